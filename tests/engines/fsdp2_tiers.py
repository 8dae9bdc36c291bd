"""The loop of plans that have something of a script's own FSDP2 on another tier, or in few bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from memadvisor.cost.transfers import TransferTimes
from memadvisor.engines.apply import apply
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import Plan
from memadvisor.schedule import Lane
from tests.engines.fsdp2_loop import Recorded, foreseen, is_near, looped
from tests.engines.test_fsdp2 import Training

_BANDWIDTH = TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
TIERS = TransferTimes({Lane.DISK: _BANDWIDTH, Lane.COMPUTE: _BANDWIDTH}, "a test")

Found = tuple[bool, float, dict[str, tuple[int, list[int]]]]


def with_units(plan: Plan, names: Collection[str], **changes: Any) -> Plan:
    return replace(plan, units=tuple(replace(u, **changes) if u.name in names else u for u in plan.units))


def loop(
    rank: int,
    folder: str,
    plans: dict[str, Plan],
    look: Callable[[str, Training, bool], None] = lambda name, training, under: None,
) -> Found:
    """Whether all losses are those of the plain training, how far they are off, and peaks: predicted, and measured.

    `look` is called with each of the plans after its training, and when it has been taken off.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    plain, planned = Training(rank), Training(rank)
    profiled = Recorded(rank, folder, lambda: planned.losses(4))

    @contextmanager
    def under(name: str, plan: Plan) -> Iterator[None]:
        applied = apply(plan, planned.model, planned.optimizer)
        yield
        if name in plans:
            look(name, planned, True)
        applied.remove()
        look(name, planned, False)

    def foresee(plains):
        return foreseen(plains, 0.97, lambda names: plans, TIERS)

    peaks = looped(rank, profiled, foresee, under, is_near).peaks
    losses, expected = profiled.losses, plain.losses(len(profiled.losses) // 2)
    errors = (abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    return losses == expected, max(errors), {name: peaks[name] for name in plans}


def are_near(peaks: dict[str, tuple[int, list[int]]]) -> bool:
    return all(any(is_near(predicted, peak) for peak in measured) for predicted, measured in peaks.values())
