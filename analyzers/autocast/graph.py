"""A traced step as operators that read and make storages, and each node of its backward with the operator it is of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from memadvisor.analyzers.inner_workspaces import INSIDE
from memadvisor.run.records import ModuleCall, Operator, Storage
from memadvisor.run.run import RankRun

_SLACK_S = 2e-5  # by which the allocator's clock and the operators' may differ
FORWARDS = ("forward", "recompute")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An operator with what it was given, in the order of its arguments, and what it has made."""

    row: Operator
    reads: tuple[Storage, ...]
    made: tuple[Storage, ...]

    @property
    def result(self) -> Storage | None:
        """What its first result is on; of a view, and of what changes its operand, that one."""
        return next(iter(self.made or self.reads), None)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Operators of the backward that ran one after the other in one node, and the operator that autograd made it for."""

    calls: tuple[Call, ...]
    of: Call

    @property
    def start_s(self) -> float:
        return self.calls[0].row.start_s

    @property
    def end_s(self) -> float:
        return self.calls[-1].row.end_s


class StepGraph:
    """`calls` in order of time; `outermost`: calls of models from outside of any module, and second ones in backwards.

    `evaluations`: those among them without gradients, of which the run has no call, each with the last that it made.
    """

    def __init__(self, rank: RankRun) -> None:
        by_id = {row.storage_id: row for row in rank.storages}
        reads: dict[int, list[Storage]] = defaultdict(list)
        for row in rank.operator_reads:
            if row.storage_id in by_id:
                reads[row.operator_id].append(by_id[row.storage_id])
        operators = sorted(rank.operators, key=lambda row: row.start_s)
        made = _made_by(operators, rank.storages)
        self.calls = [
            Call(
                row, tuple(reads[row.operator_id]) if row.operator_id is not None else (), tuple(made[place])
            )
            for place, row in enumerate(operators)
        ]
        trained = _outermost(rank.module_calls)
        self.evaluations = _evaluations(self.calls, rank.module_calls, trained)
        self.outermost = _outermost([*trained, *(one for one, _ in self.evaluations)])
        self._off = sorted(rank.autocast_off, key=lambda row: row.start_s)
        self._nodes = _nodes(self.calls)

    def owner(self, node: int | None, before_s: float) -> Call | None:
        """The operator of a forward that autograd made this node for, the last before a moment."""
        found = self._nodes.get(node, ()) if node is not None else ()
        place = bisect_left(found, before_s, key=lambda call: call.row.start_s) - 1
        return found[place] if place >= 0 else None

    def running_at(self, time_s: float) -> Call | None:
        """The operator that runs at a moment."""
        place = bisect_right(self.calls, time_s, key=lambda call: call.row.start_s) - 1
        return self.calls[place] if place >= 0 and time_s <= self.calls[place].row.end_s else None

    def is_off_at(self, time_s: float) -> bool:
        """Whether the script has autocast switched off itself."""
        place = bisect_right(self._off, time_s, key=lambda row: row.start_s) - 1
        return place >= 0 and time_s < self._off[place].end_s

    def groups(self) -> list[Group]:
        """Of the backward, in order of time; without what belongs to no operator of a forward."""
        backward = [call for call in self.calls if call.row.phase == "backward"]
        found = []
        for node, calls in groupby(backward, key=lambda call: call.row.node):
            together = tuple(calls)
            of = self.owner(node, together[0].row.start_s)
            if of is not None:
                found.append(Group(together, of))
        return found

    def outermost_at(self, time_s: float) -> ModuleCall | None:
        """The outermost call that runs at a moment."""
        place = bisect_right(self.outermost, time_s, key=lambda call: call.start_s) - 1
        return (
            self.outermost[place] if place >= 0 and time_s <= self.outermost[place].end_s + _SLACK_S else None
        )


def _made_by(operators: Sequence[Operator], storages: Sequence[Storage]) -> dict[int, list[Storage]]:
    """Results, by the place of the operator that has made them."""
    starts = [row.start_s for row in operators]
    found: dict[int, list[Storage]] = defaultdict(list)
    for row in sorted(storages, key=lambda row: row.birth_s):
        if row.phase == "baseline" or row.operator.startswith(INSIDE):
            continue
        place = bisect_right(starts, row.birth_s + _SLACK_S) - 1
        while place >= 0 and operators[place].name != row.operator and starts[place] > row.birth_s:
            place -= 1
        if place >= 0 and row.birth_s <= operators[place].end_s + _SLACK_S:
            found[place].append(row)
    return found


def _outermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    found: list[ModuleCall] = []
    for call in sorted(calls, key=lambda call: (call.start_s, -call.end_s)):
        if not found or call.start_s >= found[-1].end_s:
            found.append(call)
    return found


def _evaluations(
    calls: Sequence[Call], module_calls: Sequence[ModuleCall], trained: Sequence[ModuleCall]
) -> list[tuple[ModuleCall, Storage | None]]:
    """Forwards of models that train, which autograd keeps nothing of: their operators, one after the other, in no call."""
    modules = {call.module for call in module_calls}
    starts = [call.start_s for call in trained]

    def is_evaluation(call: Call) -> bool:
        place = bisect_right(starts, call.row.start_s) - 1
        is_in_call = place >= 0 and call.row.start_s <= trained[place].end_s + _SLACK_S
        return call.row.phase == "forward" and call.row.module in modules and not is_in_call

    found: list[tuple[ModuleCall, Storage | None]] = []
    for is_one, group in groupby(calls, key=is_evaluation):
        if is_one:
            inside = list(group)
            first, last = inside[0].row, inside[-1].row
            call = ModuleCall(
                call_id=-1 - len(found),
                module=first.module,
                unit=first.unit,
                phase="forward",
                micro_batch=0,
                start_s=first.start_s,
                end_s=last.end_s,
            )
            found.append((call, inside[-1].result))
    return found


def _nodes(calls: Sequence[Call]) -> dict[int, list[Call]]:
    """By node, the operators that it was made for: one of each forward in which the number came up."""
    found: dict[int, list[Call]] = defaultdict(list)
    last: int | None = None
    for call in calls:
        if call.row.phase == "backward" or call.row.node is None:
            last = None if call.row.phase == "backward" else last
            continue
        if call.row.node != last:
            found[call.row.node].append(call)
        last = call.row.node
    return found
