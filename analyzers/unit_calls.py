"""Calls of modules inside units, and runs of siblings that could be parts (unit_parts.py)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memadvisor.run.records import ModuleCall
from memadvisor.run.run import RankRun

_MAX_SIBLINGS = 16  # of longer runs, single modules alone


@dataclass(slots=True)
class UnitCall:
    row: ModuleCall
    inputs: frozenset[int]  # storages
    changes_input: bool
    inside: list[UnitCall] = field(default_factory=list)


def calls_of_units(rank: RankRun) -> dict[str, list[UnitCall]]:
    """By unit, the calls of its module with those inside them."""
    inputs: dict[int, set[int]] = defaultdict(set)
    changing = set()
    for tensor in rank.call_tensors:
        if tensor.role == "input":
            inputs[tensor.call_id].add(tensor.storage_id)
        if tensor.is_changed:
            changing.add(tensor.call_id)
    found: dict[str, list[UnitCall]] = defaultdict(list)
    stack: list[UnitCall] = []
    rows = [row for row in rank.module_calls if row.phase == "forward"]
    for row in sorted(rows, key=lambda row: (row.start_s, -row.end_s)):
        call = UnitCall(
            row,
            frozenset(inputs[row.call_id]),
            row.call_id in changing,
        )
        while stack and stack[-1].row.end_s <= row.start_s:
            stack.pop()
        if stack:
            stack[-1].inside.append(call)
        if row.module == row.unit:
            found[row.unit].append(call)
        stack.append(call)
    return found


def all_inside(call: UnitCall) -> Iterator[UnitCall]:
    for inner in call.inside:
        yield inner
        yield from all_inside(inner)


def runs_of(siblings: Sequence[UnitCall]) -> Iterator[list[UnitCall]]:
    """The longest ones in which each is called with nothing but what the one before it returned."""
    run: list[UnitCall] = []
    for call in siblings:
        if run and not call.row.takes_last:
            yield run
            run = []
        run.append(call)
    if run:
        yield run


def spans_of(run: Sequence[UnitCall]) -> Iterator[Sequence[UnitCall]]:
    longest = len(run) if len(run) <= _MAX_SIBLINGS else 1
    for first in range(len(run)):
        for last in range(first + 1, min(first + longest, len(run)) + 1):
            yield run[first:last]
