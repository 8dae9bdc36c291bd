"""Estimates of models whose decoder looks at an encoder's result."""

from dataclasses import replace

import pytest

from memadvisor.architecture import target_length
from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.flops import forward_flops
from memadvisor.cost.layouts.saved import chunk_saved_bytes
from memadvisor.errors import UsageError
from memadvisor.layout import Layout, TrainingStep
from tests.cost.layouts.nodes import make_cluster

MODEL = load_architecture("bart-base")  # 6 layers of an encoder, 6 of a decoder


def step(source=256, target=64, **layout):
    return TrainingStep(layout=Layout(**layout), seq_len=source, target_len=target)


def estimate(posed, model=MODEL):
    machines = make_cluster(posed.layout.num_ranks, "A100-SXM4-80GB", inside=300e9, across=25e9)
    return estimate_step(model, posed, machines)


def test_products_are_those_of_the_source_and_of_the_target():
    """By hand, from the shapes of twelve layers of width h."""
    h, ffn, vocab, s, t = 768, 3072, 50265, 256, 64
    layer = 4 * h * h + 2 * h * ffn
    encoder = 6 * (s * 2 * layer + 2 * 2 * s * s * h)
    cross = t * 2 * 2 * h * h + s * 2 * 2 * h * h + 2 * 2 * t * s * h
    decoder = 6 * (t * 2 * layer + 2 * 2 * t * t * h + cross)
    assert forward_flops(MODEL, step()) == pytest.approx(encoder + decoder + t * 2 * h * vocab, rel=2e-3)


def test_the_encoder_s_result_is_kept_by_each_stage_of_the_decoder_and_once_on_it():
    posed, hidden = step(micro_batch_size=2), MODEL.hidden
    result = 2 * 2 * 256 * hidden
    one, three = (chunk_saved_bytes(MODEL, posed, tuple(range(6, last))) for last in (7, 9))
    of_layer = (three - one) / 2
    assert one - of_layer == 2 * result  # and its gradient
    assert chunk_saved_bytes(MODEL, posed, (0, 1)) == 2 * chunk_saved_bytes(MODEL, posed, (0,))


@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor": 4, "sequence_parallel": True}, {"pipeline": 4, "num_microbatches": 8}, {"data": 4, "zero_stage": 3},
     {"recompute": "full"}],
)  # fmt: skip
def test_longer_sources_and_targets_take_more_time_and_memory(layout):
    usual, source, target = (estimate(step(*lengths, **layout)) for lengths in ((512, 512), (1024, 512), (512, 1024)))  # fmt: skip
    assert sum(usual.time_s.values()) == pytest.approx(usual.step_time_s)
    for longer in (source, target):
        assert longer.step_time_s > usual.step_time_s
        ends = [each.first.total_bytes + each.last.total_bytes for each in (usual, longer)]
        assert ends[1] > ends[0]
    assert 0 < usual.mfu <= usual.hfu < 1


def test_lengths_that_a_model_does_not_have_are_refused():
    with pytest.raises(UsageError, match="target's length is not given"):
        estimate(replace(step(), target_len=None))
    with pytest.raises(UsageError, match="one stack of layers"):
        estimate(step(), load_architecture("gpt2"))
    with pytest.raises(UsageError, match="context parallelism"):
        estimate(step(context=2))
    with pytest.raises(UsageError, match="has no encoder"):
        target_length(load_architecture("gpt2"), 64, 128)
    assert target_length(MODEL, None, 128) == 128 and target_length(MODEL, 64, 128) == 64
