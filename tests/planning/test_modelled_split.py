from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.errors import UsageError
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.planning.modelled_split import with_balanced_stages

CLUSTER = parse_cluster("8xH100,nodes=4")
LARGE_VOCABULARY = load_architecture("gemma-7b")


def a_step(pipeline, **changes):
    layout = Layout(data=32 // pipeline, pipeline=pipeline, zero_stage=1, num_microbatches=32, **changes)
    return TrainingStep(layout=layout, seq_len=8192)


def of(layers, step):
    return replace(step, layout=replace(step.layout, stage_layers=layers))


def test_no_neighbouring_split_that_fits_is_faster():
    """One layer moved from any stage to any other, the pipeline played anew."""
    step = with_balanced_stages(LARGE_VOCABULARY, a_step(4), CLUSTER)
    chosen = step.layout.stage_layers
    best = estimate_step(LARGE_VOCABULARY, step, CLUSTER)
    assert best.fits
    for giver in range(4):
        for taker in range(4):
            moved = list(chosen)
            moved[giver] -= 1
            moved[taker] += 1
            if min(moved) >= 0:
                other = estimate_step(LARGE_VOCABULARY, of(tuple(moved), step), CLUSTER)
                assert not other.fits or other.step_time_s >= best.step_time_s * (1 - 0.005)


def test_stages_are_balanced_within_their_memory():
    """A head as dear as several layers; the first stage holds eight microbatches of what it has."""
    usual = estimate_step(LARGE_VOCABULARY, a_step(8), CLUSTER)
    assert not usual.fits
    split = estimate_step(
        LARGE_VOCABULARY, with_balanced_stages(LARGE_VOCABULARY, a_step(8), CLUSTER), CLUSTER
    )
    assert split.fits and split.step_time_s <= usual.step_time_s * 1.01


def test_devices_with_several_parts_are_refused():
    with pytest.raises(UsageError, match="several parts"):
        with_balanced_stages(LARGE_VOCABULARY, a_step(4, chunks=2, schedule="interleaved"), CLUSTER)
