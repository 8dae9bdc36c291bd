"""What autograd keeps of units of a script's own FSDP2 lies on another tier, or is rounded, as predicted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from memadvisor.cost.transfers import TransferTimes
from memadvisor.engines.apply import apply
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import Plan
from memadvisor.schedule import Lane
from tests.engines.fsdp2_loop import foreseen, is_near, looped, profile_in_turn
from tests.engines.ranks import run_ranks
from tests.engines.test_fsdp2 import BLOCKS, Training, by_units

DISK = TransferTimes({Lane.DISK: TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)}, "a test")


def with_blocks(plan: Plan, blocks, **changes) -> Plan:
    names = {f"blocks.{number}" for number in blocks}
    return replace(plan, units=tuple(replace(u, **changes) if u.name in names else u for u in plan.units))


MOVED = {
    "freed": with_blocks(by_units(range(BLOCKS), gather_depth=1), range(BLOCKS), activation_tier="disk"),
    "run-again": with_blocks(by_units((0, 3), recompute=(1, 2)), (0, 1, 2), activation_tier="disk"),
}
ROUNDED = {"rounded": with_blocks(by_units((), recompute=(0,)), range(1, BLOCKS), activation_bits=8)}


def loop(
    rank: int, folder: str, plans: dict[str, Plan]
) -> tuple[bool, float, dict[str, tuple[int, list[int]]]]:
    """Whether all losses are those of the plain training, how far they are off, and peaks: predicted, and measured."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    plain, planned = Training(rank), Training(rank)
    losses: list[float] = []

    def profiled(name: str) -> Path:
        with profile_in_turn(rank, Path(folder) / name):
            losses.extend(planned.losses(4))
        dist.barrier()
        return Path(folder) / name

    @contextmanager
    def under(name: str, plan: Plan) -> Iterator[None]:
        applied = apply(plan, planned.model, planned.optimizer)
        yield
        applied.remove()

    def foresee(plains):
        return foreseen(plains, 0.97, lambda names: plans, DISK)

    peaks = looped(rank, profiled, foresee, under, is_near).peaks
    expected = plain.losses(len(losses) // 2)
    errors = (abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    return losses == expected, max(errors), {name: peaks[name] for name in plans}


def are_near(peaks) -> bool:
    return all(any(is_near(predicted, peak) for peak in measured) for predicted, measured in peaks.values())


@pytest.mark.timeout(150)
def test_moved_activations_leave_losses_alone_and_the_peak_that_was_predicted(tmp_path):
    for are_equal, _, peaks in run_ranks(loop, 2, str(tmp_path), MOVED):
        assert are_equal
        assert are_near(peaks), peaks


@pytest.mark.timeout(150)
def test_rounded_activations_leave_the_peak_that_was_predicted(tmp_path):
    for are_equal, error, peaks in run_ranks(loop, 2, str(tmp_path), ROUNDED):
        assert not are_equal and error < 0.05
        assert are_near(peaks), peaks
