"""When float32 is called a waste, by data sheets; which GPU it would be is made up."""

import dataclasses

import pytest

from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import changes_of
from memadvisor.hardware.hardware import Hardware
from tests.make_run import make_run

PEAK = 1e10  # FLOP/s: the made-up step of 0.1 s needs some 0.11 GFLOP


def found(peaks: dict[str, float], device: str = "cuda:0", matmul: str = "ieee") -> ScriptChange | None:
    run = make_run(num_ranks=1, device=device)
    rank = run.ranks[0]
    rank = dataclasses.replace(rank, process=dataclasses.replace(rank.process, float32_matmul=matmul))
    hardware = Hardware(
        name="a card",
        kind="datasheet",
        source="a test",
        memory_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        peak_flops_per_s=peaks,
    )
    return next((c for c in changes_of(run, rank, hardware) if c.kind == "narrow_products"), None)


def test_both_ways_are_named_with_the_least_time_by_each_peak():
    change = found({"float32": PEAK, "bfloat16": 10 * PEAK, "tf32": 5 * PEAK})

    assert change is not None
    assert "in bfloat16" in change.seen and "in tf32 (datasheet)" in change.seen
    assert "torch.autocast" in change.change and "set_float32_matmul_precision" in change.change
    assert change.step_saved_s is None  # how long products take on a GPU is not recorded


@pytest.mark.parametrize(
    ("peaks", "device", "matmul"),
    [
        ({"float32": PEAK}, "cuda:0", "ieee"),  # nothing narrower is known
        ({"float32": PEAK, "bfloat16": 1.5 * PEAK}, "cuda:0", "ieee"),
        (
            {"float32": 1000 * PEAK, "bfloat16": 10_000 * PEAK},
            "cuda:0",
            "ieee",
        ),  # the step waits for something else
        ({"float32": PEAK, "bfloat16": 10 * PEAK}, "cpu", "ieee"),
        ({"float32": PEAK, "tf32": 5 * PEAK}, "cuda:0", "tf32"),  # as it should be
    ],
)
def test_otherwise_nothing_is_said(peaks, device, matmul):
    assert found(peaks, device, matmul) is None
