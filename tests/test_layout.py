import pytest

from memadvisor.errors import UsageError
from memadvisor.layout import Layout, TrainingStep


def test_ranks_and_tokens_multiply():
    layout = Layout(data=4, tensor=2, pipeline=2, context=2, micro_batch_size=3, num_microbatches=5)
    assert layout.num_ranks == 32
    assert layout.shard_ranks == 8
    step = TrainingStep(layout=layout, seq_len=10)
    assert (step.global_batch_sequences, step.tokens) == (60, 600)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"tensor": 0}, "tensor is 0"),
        ({"zero_stage": 4}, "ZeRO stage is 4"),
        ({"recompute": "some"}, "recompute is 'some'"),
        ({"data": 6, "shard": 4}, "6 replicas do not part into groups of 4"),
        ({"offload_activations": 1.5}, "is 1.5"),
    ],
)
def test_a_layout_that_cannot_be_says_why(fields, words):
    with pytest.raises(UsageError, match=words):
        Layout(**fields)
