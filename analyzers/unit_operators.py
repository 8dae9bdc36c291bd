"""The operators of each unit's forward whose outputs a recomputation may keep, with their bytes and seconds.

An operator is named by its place among the calls of its name in the unit's forward, as the engine counts them. One
is left out if any storage that it makes flows to other units, is written into later on, or is needed for nothing
that is run again. Operators in place that follow at once count with it: what is kept is what they leave.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from memadvisor.analyzers.placement import Passes, Placed
from memadvisor.analyzers.time_shares import TimeShares
from memadvisor.cost.kept import Event, ForwardOperators, KeepableOperator, KeepableStorage, cut
from memadvisor.cost.rounded_activations import Timed
from memadvisor.cost.step import STATES, Bytes
from memadvisor.operator_calls import UNCOUNTED
from memadvisor.run.records import Operator
from memadvisor.run.run import RankRun

_SLACK_S = 1e-5  # two clocks: a storage may seem to be born a little beside its operator
_BESIDE_S = 1e-5  # an operator's share of modules' calls and of making a graph, on common processors


class Change(Timed, Protocol):
    """What this file needs of a change of live bytes (analyzers/segment_memory.py)."""

    @property
    def number(self) -> int: ...
    @property
    def is_own(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Group:
    """An operator and those in place on its output that follow it; `outputs` are numbers of placed storages. `is_asked_for`:
    a second run comes to it."""

    name: str
    rows: tuple[Operator, ...]
    outputs: tuple[int, ...]
    is_asked_for: bool = True


@dataclass(frozen=True, slots=True)
class Forward:
    """A unit's forward: all its operators, what may be kept of them, and when the last tensor was saved. `late`: what comes
    after that."""

    rows: tuple[Operator, ...]
    groups: tuple[Group, ...]
    last_saved_s: float
    late: tuple[Group, ...] = ()

    def operators(
        self, start: Bytes, unsaved: Iterable[Change], events: Iterable[Change], placed: Sequence[Placed]
    ) -> ForwardOperators:
        """`unsaved`: the changes of a forward that keeps nothing; `events`: those that were captured."""
        owner = {number: place for place, group in enumerate(self.groups) for number in group.outputs}
        held = {n: place for place, group in enumerate((*self.groups, *self.late)) for n in group.outputs}
        forward, deaths = cut(start, [_event(change, held) for change in unsaved], at_births=False)
        again, births = cut({}, self._again(events, owner), at_births=True)
        return ForwardOperators(
            operators=tuple(_operator(group, placed) for group in self.groups),
            late=tuple(group.name for group in self.late),
            forward=forward,
            deaths=deaths,
            again=again,
            births=births,
        )

    def _again(self, events: Iterable[Change], owner: Mapping[int, int]) -> list[Event | int]:
        marks: list[tuple[float, int, Event | int]] = [
            (change.time_s, 1 + (change.delta_bytes > 0), _event(change, owner))
            for change in events
            if change.is_own and change.category not in STATES and change.time_s <= self.last_saved_s
        ]
        for place, group in enumerate(self.groups):
            marks.append((group.rows[0].start_s, 0, place))
            marks.append((group.rows[-1].end_s, 3, -1))
        return [mark for _, _, mark in sorted(marks, key=lambda entry: entry[:2])]


def _event(change: Change, owner: Mapping[int, int]) -> Event:
    return Event(change.delta_bytes, change.category, owner.get(change.number))


def _operator(group: Group, placed: Sequence[Placed]) -> KeepableOperator:
    return KeepableOperator(
        name=group.name,
        seconds=sum(row.end_s - row.start_s for row in group.rows),
        is_random=any(row.is_random for row in group.rows),
        storages=tuple(
            KeepableStorage(
                category=item.row.category,
                size_bytes=item.row.size_bytes,
                death_segment=item.death if item.saved else None,
            )
            for item in (placed[number] for number in group.outputs)
        ),
    )


def unit_forwards(
    rank: RankRun, passes: Passes, placed: Sequence[Placed], kept: Set[int]
) -> dict[int, Forward]:
    """By forward segment, of those units that have something to keep; none in runs that do not say what is random.

    `kept`: the numbers of the storages that autograd keeps for one unit alone.
    """
    rows = [row for row in rank.operators if row.phase == "forward" and row.is_random is not None]
    rows.sort(key=lambda row: row.start_s)
    starts = [row.start_s for row in rows]
    born: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(placed):
        if item.birth in passes.forward:
            born[item.birth].append(number)
    found = {}
    for position, (unit, _) in passes.forward.items():
        if unit in passes.called_again:
            continue
        piece = passes.pieces[position]
        own = rows[bisect_left(starts, piece.start_s) : bisect_right(starts, piece.end_s)]
        made = [(number, placed[number]) for number in born[position]]
        last_saved_s = _last_saved_s(position, made, passes)
        all_groups = tuple(_groups(own, _outputs(own, made), placed, position, kept, last_saved_s))
        groups = _without_lost_numbers(own, [group for group in all_groups if group.is_asked_for])
        if groups:
            late = tuple(group for group in all_groups if not group.is_asked_for)
            found[position] = Forward(tuple(own), groups, last_saved_s, late)
    return found


def _without_lost_numbers(rows: Sequence[Operator], groups: Sequence[Group]) -> tuple[Group, ...]:
    """Where an operator that draws numbers runs again, so must all that drew before it, for the numbers to be the same."""
    kept = {id(row) for group in groups for row in group.rows}
    again_s = max((row.start_s for row in rows if row.is_random and id(row) not in kept), default=0.0)
    return tuple(
        group
        for group in groups
        if group.rows[0].start_s > again_s or not any(row.is_random for row in group.rows)
    )


def _outputs(rows: Sequence[Operator], made: Iterable[tuple[int, Placed]]) -> dict[int, list[int]]:
    """By place of an operator, the storages that it makes, without those that it only works with."""
    starts = [row.start_s for row in rows]
    outputs: dict[int, list[int]] = defaultdict(list)
    for number, item in made:
        place = bisect_left(starts, item.row.birth_s) - 1
        near = next((n for n in (place, place + 1) if _makes(rows[n : n + 1], item) and n >= 0), None)
        if near is not None:
            outputs[near].append(number)
    return outputs


def _makes(rows: Sequence[Operator], item: Placed) -> bool:
    """Whether the storage is a result of the operator, if there is one."""
    birth_s = item.row.birth_s
    return any(
        row.name == item.row.operator and row.start_s - _SLACK_S <= birth_s <= row.end_s + _SLACK_S
        for row in rows
    )


def _last_saved_s(position: int, made: Iterable[tuple[int, Placed]], passes: Passes) -> float:
    """When the unit saves its last tensor: there a run again stops."""
    unit, end_s = passes.forward[position][0], passes.pieces[position].end_s
    times = [saved.saved_s for _, item in made for saved in item.saved if saved.unit == unit]
    return max((time_s for time_s in times if time_s <= end_s), default=0.0)


def _groups(
    rows: Sequence[Operator],
    outputs: Mapping[int, Sequence[int]],
    placed: Sequence[Placed],
    position: int,
    kept: Set[int],
    last_saved_s: float,
) -> Iterator[Group]:
    counts: Counter[str] = Counter()
    last_change = {row.changes: place for place, row in enumerate(rows) if row.changes is not None}
    for place, row in enumerate(rows):
        name = f"{row.name}#{counts[row.name]}"
        counts[row.name] += 1
        made = [placed[number] for number in outputs.get(place, ())]
        ids = {item.row.storage_id for item in made}
        end = place + 1
        while end < len(rows) and rows[end].changes in ids:
            end += 1
        is_final = all(last_change.get(storage_id, 0) < end for storage_id in ids)
        is_needed = rows[end - 1].end_s <= last_saved_s
        own = all(_is_own(number, placed, position, kept) for number in outputs.get(place, ()))
        if made and is_final and own and row.name not in UNCOUNTED:
            yield Group(name, tuple(rows[place:end]), tuple(outputs[place]), is_needed)


def _is_own(number: int, placed: Sequence[Placed], position: int, kept: Set[int]) -> bool:
    """Whether a storage is of its unit alone: saved for it, or gone by the end of its forward."""
    item = placed[number]
    is_passing = item.death == position and not item.saved and item.row.category not in STATES
    return number in kept or is_passing


def timed_operators(
    rank: RankRun,
    forwards: Mapping[int, Forward],
    found: Mapping[int, ForwardOperators],
    durations: Sequence[float],
) -> dict[int, ForwardOperators]:
    """The same with seconds of the timed steps; of operators of like forwards, each the median,
    but no more in all than the forward takes.

    On CPU the forward is shared out by what its operators took in the traced step, and `_BESIDE_S` for what Python
    and autograd do beside each of them, which a run again does too. On an accelerator none may be kept where its roofs
    are not known (time_shares.py).
    """
    scaled: dict[int, list[float]] = {}
    shares = TimeShares(rank)
    for position in found:
        own = _seconds(rank, shares, forwards[position], durations[position])
        if own is not None:
            scaled[position] = own
    classes: dict[object, list[int]] = defaultdict(list)
    for position in scaled:
        operators = found[position].operators
        classes[tuple((each.name, each.size_bytes) for each in operators)].append(position)
    typical: dict[int, ForwardOperators] = {}
    for positions in classes.values():
        seconds = [median(column) for column in zip(*(scaled[p] for p in positions), strict=True)]
        for position in positions:
            operators = found[position].operators
            # This one's own forward may have been faster than most.
            share = min(
                1.0, durations[position] / max(sum(seconds) + _beside_s(rank, forwards[position]), 1e-12)
            )
            changed = tuple(replace(o, seconds=share * s) for o, s in zip(operators, seconds, strict=True))
            typical[position] = replace(found[position], operators=changed)
    return typical


def _seconds(rank: RankRun, shares: TimeShares, forward: Forward, duration_s: float) -> list[float] | None:
    """Seconds of each group; None where nothing is known."""
    taken = shares.of(forward.rows)
    if taken is None:
        return None
    scale = duration_s / max(sum(taken.values()) + _beside_s(rank, forward), 1e-12)
    return [scale * sum(taken[id(row)] for row in group.rows) for group in forward.groups]


def _beside_s(rank: RankRun, forward: Forward) -> float:
    return _BESIDE_S * len(forward.rows) if rank.process.device == "cpu" else 0.0
