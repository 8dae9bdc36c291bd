"""What two runs ran, on what, and under which plan: where that differs, before any figure is compared."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from memadvisor.analyzers.utilization import compute_dtype
from memadvisor.plan import Plan
from memadvisor.plan_words import plan_text
from memadvisor.run.run import UNKNOWN, RankRun, Run

Value = str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Something that two runs do not have in common. What one of them did not record is none; a `plan` of None is that
    no plan was applied.

    `changes_kind`: figures of runs that differ in it are of different trainings, not of one before and after a change.
    """

    name: str
    before: Value
    after: Value
    changes_kind: bool

    @property
    def label(self) -> str:
        """`number of parameters`, `micro-batches per step`."""
        words = self.name.removeprefix("num_").replace("micro_batch", "micro-batch").replace("_", " ")
        return f"number of {words}" if self.name.startswith("num_") else words


# Of other scripts, models, batches, devices and numbers of ranks memory and time are not of the same work.
_KIND = (
    "script",
    "world_size",
    "device",
    "device_name",
    "num_parameters",
    "samples_per_step",
    "tokens_per_step",
)


def differing_settings(before: Run, after: Run) -> tuple[Setting, ...]:
    """Settings that differ, those that change the kind of run first; ranks are told by the first that both have."""
    first, second = _settings(before, after), dict(_settings(after, before))
    if first["plan"] == second["plan"] and _asked_by(before.plan) != _asked_by(after.plan):
        second["plan"] = f"{second['plan']} (another plan)"
    found = [
        Setting(name=name, before=one, after=other, changes_kind=_changes_kind(name, one, other))
        for name, one, other in ((name, first[name], second[name]) for name in first)
        if one != other and (name == "plan" or (one is not None and other is not None))
    ]
    return tuple(sorted(found, key=lambda setting: not setting.changes_kind))


def _changes_kind(name: str, one: Value, other: Value) -> bool:
    if name == "script":  # a script may be named from another directory
        return PurePath(str(one)).name != PurePath(str(other)).name
    return name in _KIND


def _settings(run: Run, other: Run) -> Mapping[str, Value]:
    rank = _told_by(run, other)
    process = rank.process
    has_manifest = run.manifest.script != UNKNOWN
    return {
        "script": run.manifest.script if has_manifest else None,
        "world_size": run.manifest.world_size,
        "device": process.device.partition(":")[0],
        "device_name": process.device_name,
        "num_parameters": sum(p.num_elements for p in rank.parameters if not p.tied_to) or None,
        **_batch(rank),
        "arguments": shlex.join(run.manifest.arguments) if has_manifest else None,
        "compute_dtype": compute_dtype(rank),
        "plan": None if run.plan is None else plan_text(run.plan, rank.units),
        "device_memory_bytes": process.device_memory_bytes,
        "host": process.host,
        "num_threads": process.num_threads,
        "torch_version": process.torch_version,
        "python_version": process.python_version,
        "memadvisor_version": run.manifest.memadvisor_version if has_manifest else None,
    }


def _asked_by(plan: Plan | None) -> Plan | None:
    """Without what it expects, and why."""
    return None if plan is None else replace(plan, prediction=None, why="", budget_bytes=None)


def _told_by(run: Run, other: Run) -> RankRun:
    theirs = {rank.process.rank for rank in other.ranks}
    return next((rank for rank in run.ranks if rank.process.rank in theirs), run.ranks[0])


def _batch(rank: RankRun) -> dict[str, Value]:
    """Of the traced step; where none was traced, of the last one."""
    step = rank.traced_step or (rank.steps[-1] if rank.steps else None)
    return {
        "micro_batches_per_step": None if step is None else step.num_micro_batches,
        "samples_per_step": None if step is None else step.num_samples,
        "tokens_per_step": None if step is None else step.num_tokens,
    }
