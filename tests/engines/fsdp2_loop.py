"""Profile, advise, apply, profile again, on the ranks of one training whose script uses FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.api import Profile
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.late_sharding import LateSharding
from memadvisor.cost.simulate import simulate
from memadvisor.cost.transfers import TransferTimes
from memadvisor.engines.apply import install
from memadvisor.errors import PlanError
from memadvisor.plan import Plan
from memadvisor.plan_file import plan_from_json, plan_to_json
from memadvisor.write_schedule import write_schedule

TIMES = CollectiveTimes(kind="fitted", source="a test", curves={}, alpha_s=1e-4, beta_bytes_per_s=1e9)


def profile_in_turn(rank: int, path: Path) -> Profile:
    """One rank makes the directory, before the other ones join."""
    if rank:
        dist.barrier()
    made = memadvisor.profile(path)
    if not rank:
        dist.barrier()
    return made


class Recorded:
    """A rank's training, profiled under one name after another; and all of its losses."""

    def __init__(self, rank: int, folder: str, train: Callable[[], list[float]]) -> None:
        self.losses: list[float] = []
        self._rank, self._folder, self._train = rank, Path(folder), train

    def __call__(self, name: str) -> Path:
        with profile_in_turn(self._rank, self._folder / name):
            self.losses.extend(self._train())
        dist.barrier()
        return self._folder / name


def on_first(rank: int, make: Callable[[], Any]) -> Any:
    """What the first rank makes, on all of them: it alone reads runs, which takes as long on each."""
    values = [make() if rank == 0 else None]
    dist.broadcast_object_list(values)
    return values[0]


def is_near(predicted: int, measured: int) -> bool:
    return 0.99 * measured <= predicted <= 1.01 * measured


@dataclass(frozen=True)
class Foreseen:
    """Plans, with the peak and the bytes sent that are predicted of `rank`, and what the script leaves to the last micro-batch."""

    rank: int
    budget: int
    late: LateSharding
    plans: dict[str, tuple[Any, int, int]]


def foreseen(
    plains: list[Path],
    share: float,
    plans_of: Callable[[list[str]], dict[str, Plan]],
    transfers: TransferTimes | None = None,
) -> Foreseen:
    """From the lowest of several profiles: of plans for these units, and of what is advised for a share of the peak."""
    runs = [memadvisor.load(path) for path in plains]
    steps = [captured_step(run) for run in runs]
    step = min(steps, key=lambda step: step.peak_bytes)
    budget = int(share * step.peak_bytes)
    best = memadvisor.advise(runs[steps.index(step)], memory=budget).best
    plans = plans_of([unit.name for unit in step.units]) | ({} if best is None else {"advised": best})
    played = {
        name: simulate(step, write_schedule(plan, step.units), TIMES, transfers=transfers)
        for name, plan in plans.items()
    }
    found = {n: (plan_to_json(plans[n]), one.peak.total_bytes, one.sent_bytes) for n, one in played.items()}
    return Foreseen(step.rank, budget, step.late, found)


@dataclass(frozen=True)
class Loop:
    """What was foreseen; of each plan the predicted peak and those measured; and the last profile with it."""

    ahead: Foreseen
    peaks: dict[str, tuple[int, list[int]]]
    paths: dict[str, Path]


def looped(
    rank: int,
    profiled: Callable[[str], Path],
    foresee: Callable[[list[Path]], Foreseen],
    under: Callable[[str, Plan], AbstractContextManager[None]],
    is_right: Callable[[int, int], bool],
) -> Loop:
    """The whole loop: `profiled` trains and returns the run, `under` has a plan applied.

    A thread of Gloo's that lets go of a buffer late now and then makes a step that buffer higher. So what is off is
    profiled again: twice with the plan, then without one, for the lowest of those is what is predicted from.
    """
    plains: list[Path] = []
    while True:
        plains.append(profiled(f"plain-{len(plains)}"))
        ahead = on_first(rank, lambda: foresee(plains))
        peaks: dict[str, tuple[int, list[int]]] = {}
        paths: dict[str, Path] = {}
        for name, (value, predicted, _) in ahead.plans.items():
            measured: list[int] = []
            while len(measured) < 2 and not any(is_right(predicted, peak) for peak in measured):
                with under(name, plan_from_json(value, name)):
                    path = profiled(f"{name}-{len(plains)}-{len(measured)}")
                measured.append(on_first(rank, partial(traced_peak, path, ahead.rank)))
            peaks[name], paths[name] = (predicted, measured), path
        all_right = all(any(is_right(one, peak) for peak in measured) for one, measured in peaks.values())
        if all_right or len(plains) == 3:
            return Loop(ahead, peaks, paths)


def traced_peak(path: Path, number: int) -> int | None:
    return memadvisor.load(path).ranks[number].traced_step.peak_allocated_bytes


def refusal_of(plan: Plan, train: Callable[[], Any]) -> str:
    """What is said of a plan where training under it begins; nothing where it is taken."""
    applied = install(plan)
    try:
        train()
        return ""
    except PlanError as error:
        return error.one_line()
    finally:
        applied.remove()
