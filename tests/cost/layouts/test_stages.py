from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.stages import stage_layers
from memadvisor.errors import UsageError
from memadvisor.layout import STAGE_RULES, Layout
from memadvisor.software import DEEPSPEED
from memadvisor.software_traits import Software


def model(layers, head):
    """Layers of 784 parameters, and a head that is worth `head` of them."""
    return Architecture(
        name="x", n_layers=layers, hidden=8, n_heads=2, n_kv_heads=2, head_dim=4, ffn=32,
        vocab=round(head * 784 / 8), tied_embeddings=True, gated_mlp=False,
    )  # fmt: skip


def split(layers, stages, head=0.0, rule="balanced", **fields):
    layout = Layout(pipeline=stages, **fields)
    return stage_layers(model(layers, head), layout, Software(stage_rule=rule))


def test_a_head_worth_four_layers_takes_their_place_on_the_last_stage():
    assert split(16, 2, head=4.0) == (10, 6)
    assert split(16, 4, head=4.0) == (5, 5, 5, 1)
    assert split(40, 8, head=1.5) == (6, 5, 5, 5, 5, 5, 5, 4)


def test_stages_that_are_two_more_than_layers_leave_both_ends_of_the_model_alone():
    """Llama 3 405B has 126 layers on 16 ranks of 8 parts: arXiv:2407.21783, section 3.3.2."""
    assert split(6, 4, head=0.6, chunks=2, schedule="interleaved") == (0, 1, 1, 1, 1, 1, 1, 0)
    assert split(7, 4, head=0.6, chunks=2, schedule="interleaved") == (1,) * 7 + (0,)


def test_where_layers_differ_throughout_the_head_is_weighed_by_their_mean():
    """Attention alone has 256 parameters and two norms' 8, a block alone 512 and 8: a head of 784 is two layers of their mean."""
    alternating = replace(model(16, 1.0), layer_pattern="AF")
    mean = sum(alternating.layer_parameters(layer) for layer in (0, 1)) / 2
    assert mean == 392
    assert stage_layers(alternating, Layout(pipeline=2), Software()) == split(16, 2, head=2.0)


def test_dealing_by_the_running_cost_passes_each_share():
    assert split(16, 2, head=4.0, rule="running") == (11, 5)
    assert split(16, 4, head=4.0, rule="running") == (6, 5, 5, 0)


def test_equal_numbers_go_to_the_middle_first_where_they_do_not_divide():
    assert split(22, 8, rule="even") == (2, 3, 3, 3, 3, 3, 3, 2)
    assert split(24, 8, rule="even") == (3,) * 8


def test_deepspeed_counts_both_ends_so_that_like_ends_leave_equal_numbers():
    """Its PipelineModule deals out parameters (partition_method): an embedding on the first stage is as much as the head."""
    layout = Layout(pipeline=2)
    assert stage_layers(model(28, 9.0), layout, DEEPSPEED.software) == (14, 14)


def test_a_split_that_is_given_is_taken():
    assert split(6, 2, stage_layers=(4, 2)) == (4, 2)
    with pytest.raises(UsageError, match="does not deal 6 layers out to 2 stages"):
        split(6, 2, stage_layers=(4, 3))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UsageError, match="16 layers do not fill 32 pipeline stages"):
        split(16, 32)
    with pytest.raises(UsageError, match="leave 3 of 16 pipeline stages empty"):
        split(16, 16, head=4.0, rule="running")


@given(st.integers(1, 100), st.integers(1, 16), st.floats(0, 8), st.sampled_from(STAGE_RULES))
def test_every_layer_is_on_one_stage(layers, stages, head, rule):
    try:
        dealt = split(layers, stages, head, rule)
    except UsageError:
        return
    assert sum(dealt) == layers and len(dealt) == stages
    if rule == "even":
        assert max(dealt) - min(dealt) <= 1
