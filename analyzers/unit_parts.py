"""Parts of each unit that could keep nothing but what they are called with and run again by themselves.

Candidates are modules inside a unit, and runs of siblings each of which is called with nothing but the very tensor that
the one before it returned, as the engine asks for it, and no view of it; what they are called with must be kept by
autograd in any case, for them. Offered are those that lower the highest instant of the unit's second run and backward,
and those that set most free for the seconds that they take: a GELU with the layer behind it, whose input is made again
by the GELU alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from memadvisor.analyzers.changed_buffers import Copies
from memadvisor.analyzers.left_alone import modules_left_alone
from memadvisor.analyzers.placement import Passes, Placed, Stretch
from memadvisor.analyzers.time_shares import TimeShares
from memadvisor.analyzers.unit_calls import UnitCall, all_inside, calls_of_units, runs_of, spans_of
from memadvisor.cost.parts import Change, Modules, Part, PartedOptions, PartedPass, PartStorage, highest
from memadvisor.cost.second_run import RNG_STATE_BYTES, SecondRun, SecondRunCost
from memadvisor.cost.step import STATES
from memadvisor.run.records import Operator, Saved
from memadvisor.run.run import RankRun

_MAX_PARTS = 4
_MAX_SINGLES = 4  # options of one part
_LEAST_GAIN = 0.02  # of the highest instant, or of what the unit's second run sets free
_MAX_SPARING = 5
_SHORTEST_S = 1e-9


@dataclass(frozen=True, slots=True)
class _Storage:
    number: int
    item: Placed


class _Trace:
    """What all units' parts are found from."""

    def __init__(
        self, rank: RankRun, passes: Passes, placed: Sequence[Placed], freed: Set[int], casts: Set[int]
    ) -> None:
        self.passes = passes
        self.freed = freed
        self.casts = casts
        self.calls = calls_of_units(rank)
        self._copies = Copies(rank)
        self._saved = sorted(rank.saved, key=lambda row: row.saved_s)
        self.random_state_bytes = RNG_STATE_BYTES if rank.process.device == "cpu" else 0
        operators = (op for op in rank.operators if op.phase == "forward")
        self._operators = sorted(operators, key=lambda op: op.start_s)
        self.time_shares = TimeShares(rank)
        self._starts = [operator.start_s for operator in self._operators]
        self.left_alone = modules_left_alone(rank)
        self.by_id = {item.row.storage_id: item for item in placed}
        self.born: dict[int, list[_Storage]] = defaultdict(list)
        self.dead: dict[int, list[_Storage]] = defaultdict(list)
        segments = {*passes.forward, *passes.backward}
        for number, item in enumerate(placed):
            if item.birth in segments:
                self.born[item.birth].append(_Storage(number, item))
            if item.death in passes.backward:
                self.dead[item.death].append(_Storage(number, item))

    def operators(self, piece: Stretch) -> Sequence[Operator]:
        return self.between(piece.start_s, piece.end_s)

    def between(self, start_s: float, end_s: float) -> Sequence[Operator]:
        return self._operators[bisect_left(self._starts, start_s) : bisect_right(self._starts, end_s)]

    def copied_bytes(self, start_s: float, end_s: float) -> int:
        """Of buffers that change meanwhile."""
        return self._copies(self.between(start_s, end_s), self._saved_between(start_s, end_s))[0]

    def saved_copies(self, start_s: float, end_s: float, asked_s: float) -> Iterator[Change]:
        """Copies of such buffers that autograd saves in a second run, which begins at `asked_s`, until it lets go of them."""
        for size_bytes, row in self._copies.saved(self._saved_between(start_s, end_s)):
            yield Change(asked_s, size_bytes, "temporary")
            if row.released_s is not None:
                yield Change(row.released_s, -size_bytes, "temporary")

    def _saved_between(self, start_s: float, end_s: float) -> Sequence[Saved]:
        first, last = (bisect_left(self._saved, at, key=lambda row: row.saved_s) for at in (start_s, end_s))
        return self._saved[first:last]


def parted_passes(
    rank: RankRun,
    passes: Passes,
    placed: Sequence[Placed],
    freed: Set[int],
    casts: Set[int],
    runs: Mapping[tuple[str, int | None], SecondRun],
    cost: SecondRunCost,
) -> dict[tuple[str, int | None], PartedOptions]:
    """By unit and pass, choices of parts; the same in all passes of a unit.

    `freed`: numbers of the storages that recomputing their unit would set free; `casts`: of copies of weights that autocast
    holds until its context is left.
    """
    trace = _Trace(rank, passes, placed, freed, casts)
    views: dict[str, dict[int | None, _Pass]] = defaultdict(dict)
    for position, (unit, _) in passes.forward.items():
        number = passes.pieces[position].pass_number
        if unit not in passes.called_again and (unit, number) in runs:
            views[unit][number] = _Pass(trace, position, runs[unit, number])
    _take_typical_seconds([view for own in views.values() for view in own.values()])
    passes_of = Counter(unit for unit, _ in passes.forward.values())
    found: dict[tuple[str, int | None], PartedOptions] = {}
    for unit, own in views.items():
        if len(own) < passes_of[unit]:
            continue
        first = next(iter(own.values()))
        lower, sparing = _in_all(own, first.lower()), _in_all(own, first.sparing(cost))
        if lower or sparing:
            found |= {
                (unit, number): PartedOptions(lower.get(number, ()), sparing.get(number, ()))
                for number in own
            }
    return found


def _take_typical_seconds(views: Sequence[_Pass]) -> None:
    """A part takes what like parts of like units take in the median: one traced step's times differ from unit to unit."""
    seconds: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for view in views:
        for part in view.candidates:
            seconds[view.kind_of(part)].append(part.run.whole_s)
    typical_s = {kind: median(own) for kind, own in seconds.items()}
    for view in views:
        view.candidates = [
            replace(part, run=replace(part.run, whole_s=s, until_saved_s=s))
            for part in view.candidates
            for s in [typical_s[view.kind_of(part)]]
        ]


def _in_all(
    views: Mapping[int | None, _Pass], options: Sequence[tuple[Part, ...]]
) -> dict[int | None, tuple[PartedPass, ...]]:
    """By pass, these options of the first one; nothing where a pass has not all of them."""
    wanted = [tuple(part.modules for part in parts) for parts in options]
    found = {number: view.like(wanted) for number, view in views.items()}
    return found if wanted and all(found.values()) else {}


class _Pass:
    """One pass of a unit."""

    def __init__(self, trace: _Trace, position: int, run: SecondRun) -> None:
        self._trace = trace
        self._unit, self._backward = trace.passes.forward[position]
        self._position = position
        self._piece = trace.passes.pieces[position]
        self._born = trace.born[position]
        self._run = run
        self._operators = trace.operators(self._piece)
        self._seconds = trace.time_shares.of(self._operators)
        self.candidates = self._found()

    def kind_of(self, part: Part) -> tuple[object, ...]:
        """What parts have in common that take as long."""
        names = tuple(name.removeprefix(f"{self._unit}.") for name in part.modules)
        return names, part.size_bytes, part.run.num_saved, part.run.copied_bytes

    def plain(self) -> PartedPass:
        saved = [saved.saved_s for each in self._born for saved in self._saved(each)]
        return PartedPass(
            unit=self._unit,
            forward=self._position,
            backward=self._backward,
            parts=(),
            own=tuple(self._changes(self._born, max(saved, default=0.0))),
            random_state_bytes=self._trace.random_state_bytes,
        )

    def _saved(self, each: _Storage) -> Iterator[Saved]:
        end_s = self._piece.end_s
        return (s for s in each.item.saved if s.unit == self._unit and s.saved_s <= end_s)

    def _changes(self, born: Iterable[_Storage], until_s: float) -> list[Change]:
        """What they do in the forward until then; in order."""
        changes = []
        for row in (each.item.row for each in born):
            if row.category in STATES or row.birth_s > until_s:
                continue
            changes.append(Change(row.birth_s, row.size_bytes, row.category))
            if row.death_s is not None and row.death_s <= until_s:
                changes.append(Change(row.death_s, -row.size_bytes, row.category))
        return _in_order(changes)

    def lower(self) -> list[tuple[Part, ...]]:
        """Each lowers the highest instant more, and takes longer, than the one before it: single parts first, then the best
        of them with others, one after another."""
        candidates = self.candidates
        singles = sorted((part.run.whole_s, self._level([part]), at) for at, part in enumerate(candidates))
        level = self._level([]) if candidates else 0
        found: list[tuple[Part, ...]] = []
        for _, reached, at in singles:
            if reached < level - _LEAST_GAIN * level:
                level = reached
                found.append((candidates[at],))
        found = found[-_MAX_SINGLES:]
        while found and len(found[-1]) < _MAX_PARTS:
            taken = found[-1]
            free = [part for part in candidates if not any(_share(part, other) for other in taken)]
            levels = [(self._level([*taken, part]), part.run.whole_s, at) for at, part in enumerate(free)]
            best = min(levels, default=None)
            if best is None or best[0] >= level - _LEAST_GAIN * level:
                break
            level = best[0]
            found.append((*taken, free[best[2]]))
        return found

    def sparing(self, cost: SecondRunCost) -> list[tuple[Part, ...]]:
        """Each has the part more, in place of those that share modules with it, that sets most free for the seconds that it
        adds; for as long as that is more than the whole unit's second run sets free in a second."""
        seconds = {part.modules: part.run.seconds(cost) for part in self.candidates}
        unit_bytes = sum(each.item.row.size_bytes for each in self._born if each.number in self._trace.freed)
        least_rate = unit_bytes / max(self._run.seconds(cost), _SHORTEST_S)
        found: list[tuple[Part, ...]] = []
        taken: tuple[Part, ...] = ()
        while len(found) < _MAX_SPARING:
            best: tuple[float, tuple[Part, ...]] | None = None
            for part in self.candidates:
                others = tuple(each for each in taken if not _share(part, each))
                gone = [each for each in taken if each not in others]
                more_bytes = part.size_bytes - sum(each.size_bytes for each in gone)
                more_s = seconds[part.modules] - sum(seconds[each.modules] for each in gone)
                rate = more_bytes / max(more_s, _SHORTEST_S)
                if more_bytes >= _LEAST_GAIN * unit_bytes and rate > (best[0] if best else least_rate):
                    best = rate, (*others, part)
            if best is None:
                break
            taken = best[1]
            found.append(taken)
        return found

    def like(self, wanted: Sequence[tuple[Modules, ...]]) -> tuple[PartedPass, ...]:
        """The options of another pass; none where this one has not all of their parts."""
        found = {part.modules: part for part in self.candidates}
        if not all(modules in found for option in wanted for modules in option):
            return ()
        plain = self.plain()
        return tuple(plain.with_parts(found[modules] for modules in option) for option in wanted)

    def _level(self, parts: Sequence[Part]) -> int:
        """The highest instant of the second run and the backward, beside what was there before both."""
        parted = self.plain().with_parts(parts)
        kept_bytes = sum(each.item.row.size_bytes for each in self._born if each.number in self._trace.freed)
        backward = parted.backward_peak({"activation": kept_bytes}, self._backward_changes)
        return max(sum(parted.growth().values()), sum(backward.values()))

    @cached_property
    def _backward_changes(self) -> list[Change]:
        born, dead = self._trace.born[self._backward], self._trace.dead[self._backward]
        changes = [Change(e.item.row.birth_s, e.item.row.size_bytes, e.item.row.category) for e in born]
        changes += [
            Change(row.death_s, -row.size_bytes, row.category)
            for row in (each.item.row for each in dead)
            if row.death_s is not None
        ]
        return _in_order(changes)

    def _found(self) -> list[Part]:
        if self._seconds is None:  # nothing tells what a part would take
            return []
        calls = self._trace.calls.get(self._unit, [])
        root = [call for call in calls if self._piece.start_s <= call.row.start_s <= self._piece.end_s]
        inside = [call for one in root for call in all_inside(one)]
        counts = Counter(call.row.module for call in inside)
        siblings = [one.inside for one in (*root, *inside)]
        found = [
            self._part(span, counts)
            for run in (run for calls in siblings for run in runs_of(calls))
            for span in spans_of(run)
        ]
        return [part for part in found if part is not None]

    def _part(self, calls: Sequence[UnitCall], counts: Mapping[str, int]) -> Part | None:
        """None where it would free nothing, or hold what it is called with for longer than the plain run does."""
        names = tuple(call.row.module for call in calls)
        prefix = f"{self._unit}." if self._unit else ""
        if not self._trace.left_alone.isdisjoint(names):
            return None
        if any(counts[name] > 1 or not name.startswith(prefix) for name in names) or calls[0].changes_input:
            return None
        start_s, end_s = calls[0].row.start_s, calls[-1].row.end_s
        saved = [s for each in self._born for s in self._saved(each) if start_s <= s.saved_s <= end_s]
        asked = [s.unpacked_s for s in saved if s.unpacked_s is not None]
        inside = [each for each in self._born if start_s <= each.item.row.birth_s <= end_s]
        own = [each for each in inside if self._is_own(each, start_s, end_s)]
        if not own or not asked or not all(self._keeps(n, start_s, end_s) for n in calls[0].inputs):
            return None
        last_saved_s = max(s.saved_s for s in saved)
        return Part(
            modules=names,
            storages=tuple(self._storage(each, end_s) for each in own),
            asked_s=min(asked),
            over_s=max(math.inf if s.released_s is None else s.released_s for s in saved),
            start_s=start_s,
            saved_s=last_saved_s,
            growth=highest({}, self._changes(inside, last_saved_s), ()),
            put_back=tuple(self._put_back(call.row.start_s, call.row.end_s) for call in calls),
            saved_copies=tuple(self._trace.saved_copies(start_s, end_s, min(asked))),
            run=self._second_run(start_s, end_s, saved, len(calls)),
            holds_input=any(self._holds(n, start_s, end_s) for n in calls[0].inputs),
        )

    @cached_property
    def _first_cached_s(self) -> float:
        """When the first of what the unit puts into a cache of keys and values is made."""
        return min((each.item.row.birth_s for each in self._born if each.item.is_cached), default=math.inf)

    def _is_own(self, each: _Storage, start_s: float, end_s: float) -> bool:
        # A part is called without a cache that is empty, but with one that has something of its unit: of T5's decoder what
        # a token has attended to behind it, before what it attends to of the encoder.
        if each.item.is_cached and self._first_cached_s < start_s:
            return False
        return each.number in self._trace.freed and all(
            start_s <= s.saved_s <= end_s for s in each.item.saved
        )

    def _keeps(self, storage_id: int, start_s: float, end_s: float) -> bool:
        """Whether autograd keeps what a part is called with for the part, or it is there anyway."""
        item = self._trace.by_id.get(storage_id)
        if item is None or item.death > self._backward:
            return True
        return any(start_s <= s.saved_s <= end_s for s in item.saved)

    def _holds(self, storage_id: int, start_s: float, end_s: float) -> bool:
        """Whether a part is called with what the unit is, and only the part itself keeps it for the part."""
        item = self._trace.by_id.get(storage_id)
        if item is None or item.birth >= self._position:
            return False
        return not any(start_s <= s.saved_s <= end_s for s in item.saved)

    def _storage(self, each: _Storage, end_s: float) -> PartStorage:
        unsaved_s = end_s if each.item.needed_until_s is None else each.item.needed_until_s
        unsaved = self._position, max(unsaved_s, each.item.row.birth_s)
        if each.number in self._trace.casts:
            unsaved = self._trace.passes.end_of_cache(each.item), math.inf
        return PartStorage(
            number=each.number,
            category=each.item.row.category,
            size_bytes=each.item.row.size_bytes,
            unsaved=unsaved,
            death_segment=each.item.death,
        )

    def _put_back(self, start_s: float, end_s: float) -> Change:
        state_bytes = self._trace.random_state_bytes + self._trace.copied_bytes(start_s, end_s)
        return Change(start_s, state_bytes, "temporary")

    def _second_run(self, start_s: float, end_s: float, saved: Sequence[Saved], num_calls: int) -> SecondRun:
        taken_s = self._seconds or {}
        last_saved_s = max(row.saved_s for row in saved)
        inside_s = sum(taken_s[id(op)] for op in self._operators if start_s <= op.start_s <= last_saved_s)
        total_s = sum(taken_s.values())
        share = inside_s / total_s if total_s > 0 else 1.0
        seconds = self._run.whole_s * share
        return SecondRun(
            whole_s=seconds,
            until_saved_s=seconds,
            num_saved=len(saved),
            num_calls=num_calls,
            copied_bytes=self._trace.copied_bytes(start_s, end_s),
        )


def _share(one: Part, other: Part) -> bool:
    """Whether two parts have a module in common, or one lies inside a module of the other."""
    return any(
        a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.") for a in one.modules for b in other.modules
    )


def _in_order(changes: Iterable[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: (change.time_s, change.delta_bytes > 0))
