"""Where each storage of the traced step is born and dies, and where each unit runs, in segments."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from memadvisor.analyzers.batch_sizes import shrink_batch
from memadvisor.analyzers.cast_arguments import cast_arguments
from memadvisor.analyzers.derivatives import differentiated_backwards
from memadvisor.analyzers.left_alone import modules_left_alone
from memadvisor.analyzers.narrow_shares import narrow_shares
from memadvisor.analyzers.weight_casts import cached_casts, is_weight_cast
from memadvisor.cost.saved import UnitCall
from memadvisor.cost.step import STATES
from memadvisor.precision import Precision
from memadvisor.run.cut import innermost
from memadvisor.run.records import CallTensor, ModuleCall, Saved, Step, Storage
from memadvisor.run.run import RankRun


class Stretch(Protocol):
    """What this file needs of a piece of the step (analyzers/pieces.py)."""

    @property
    def phase(self) -> str: ...
    @property
    def unit(self) -> str | None: ...
    @property
    def micro_batch(self) -> int | None: ...
    @property
    def call(self) -> int: ...
    @property
    def walk(self) -> int: ...
    @property
    def pass_number(self) -> int | None: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Placed:
    """A storage and the segments of its birth and death (-1: before the step; number of segments: after).

    `taken_s`: when units were called with it, whether they use it or only have it in a list. `is_cached`: a unit's forward
    has made it and put it into a cache of keys and values, which the unit is called without where it is recomputed.
    `is_argument`: a cast of what its unit is called with (cast_arguments.py). `ends_in_cast`: its last use in the forward is
    such a cast. `cached_until`: of a weight that autocast has cast, the last segment in which its cache has that; None where
    nobody knows when the script leaves its context.
    """

    row: Storage
    birth: int
    death: int
    saved: tuple[Saved, ...]
    taken_s: tuple[float, ...] = ()
    is_cached: bool = False
    is_argument: bool = False
    ends_in_cast: bool = False
    cached_until: int | None = None

    @property
    def needed_until_s(self) -> float | None:
        """Its last use in the forward, or when somebody beside autograd was last seen to hold it; None: neither."""
        times = (self.row.last_forward_use_s, self.row.last_held_s)
        return max((time_s for time_s in times if time_s is not None), default=None)


class Passes:
    """Where each unit's forward and backward of each call are, for units that run in one piece.

    `called_again`: those that are called several times in a micro-batch, or that autograd goes through several times: for
    a derivative, and for the loss that is made of it, or for several losses of one graph. `forward` and `backward` then have
    the last of these, `walked` all, by forward segment. Units that it goes through more than twice are left out, unless it
    `only_repeats` one graph. `left_alone`: units around whose forward an engine does nothing: those that others are inside
    of, even where it never calls those (attention that takes the weights of its output layer, and leaves the layer alone),
    and those whose forward is none of their class.
    """

    def __init__(
        self, pieces: Sequence[Stretch], left_alone: Collection[str] = (), *, only_repeats: bool = False
    ) -> None:
        found: dict[tuple[str, str, int | None, int], list[int]] = defaultdict(list)
        for position, piece in enumerate(pieces):
            if piece.unit is not None:
                found[piece.phase, piece.unit, piece.micro_batch, piece.call].append(position)
        self.pieces = pieces
        self.forward: dict[int, tuple[str, int]] = {}  # forward segment -> unit, backward segment
        self.backward: dict[int, str] = {}
        walks: dict[tuple[str, int | None, int], dict[int, int]] = defaultdict(dict)
        finals: dict[int | None, int] = defaultdict(int)
        for position, piece in enumerate(pieces):
            if piece.phase == "backward":
                finals[piece.micro_batch] = max(piece.walk, finals[piece.micro_batch])
                if piece.unit is not None:
                    walks[piece.unit, piece.micro_batch, piece.call].setdefault(piece.walk, position)
        split = {
            unit
            for (phase, unit, *which), places in found.items()
            if (phase == "forward" and len(places) > 1)
            or phase == "recompute"
            or unit in left_alone
            # The rows of its forward were damaged: nobody knows what would run again.
            or (phase == "backward" and ("forward", unit, *which) not in found)
        }
        # Behind the first derivative of a unit, others may enter it where no one sees.
        split |= {
            unit
            for (unit, micro_batch, _), own in walks.items()
            if (len(own) > 2 and not only_repeats) or [*own] != [*range(min(own), finals[micro_batch] + 1)]
        }
        self.walked: dict[int, tuple[int, ...]] = {}
        self.called_again = {unit for _, unit, _, call in found if call}
        for (phase, unit, micro_batch, call), places in found.items():
            backward = found.get(("backward", unit, micro_batch, call))
            if phase == "forward" and backward and unit not in split:
                through = tuple(sorted(walks[unit, micro_batch, call].values()))
                self.forward[places[0]] = unit, through[-1]
                self.backward[through[-1]] = unit
                if len(through) > 1:
                    self.walked[places[0]] = through
                    self.called_again.add(unit)

    @property
    def walked_units(self) -> set[str]:
        """Units that autograd goes through several times."""
        return {self.forward[position][0] for position in self.walked}

    def leave_out(self, unit: str) -> None:
        """Nothing of it runs again."""
        for position in [position for position, (own, _) in self.forward.items() if own == unit]:
            del self.backward[self.forward.pop(position)[1]]
            self.walked.pop(position, None)

    def otherwise_asked(self, placed: Sequence[Placed]) -> set[str]:
        """Units that autograd was not seen to go through in all that asks for what they keep: it enters some in their
        middle, from the graph of a derivative, and some calls are not those that they were taken for. What forwards save of
        them stays in any case."""
        found = set()
        for item in placed if self.walked else ():
            own = [(row, self.forward_at(row.saved_s)) for row in item.saved]
            owners = {self._owner(position) for _, position in own if position is not None}
            for row, position in own:
                if position in self.walked and not self._is_of(position, row.unpacked_s, ()):
                    found.add(row.unit)
                is_made = position is None and item.birth in self.walked
                is_graphs = is_made and self.pieces[self.segment_at(row.saved_s)].phase == "backward"
                if is_graphs and not self._is_of(item.birth, row.saved_s, owners):
                    found.add(self.forward[item.birth][0])
        return found

    def _owner(self, position: int) -> tuple[str | None, int | None]:
        return self.pieces[position].unit, self.pieces[position].pass_number

    def _is_of(
        self, position: int, time_s: float | None, others: Collection[tuple[str | None, int | None]]
    ) -> bool:
        """Whether a moment, if there is one, is in a backward of this forward segment's call, or of others."""
        if time_s is None:
            return True
        at = self.segment_at(time_s)
        return self.pieces[at].phase == "backward" and self._owner(at) in {self._owner(position), *others}

    def unit_that_frees(self, item: Placed) -> str | None:
        """The unit whose recomputation would free this storage: it alone keeps it, from its forward on."""
        unit, backward = self.forward.get(item.birth, (None, 0))
        if unit is None or not item.saved or item.row.category in STATES or item.death <= item.birth:
            return None
        if item.is_argument or any(saved.unit != unit or saved.released_s is None for saved in item.saved):
            return None
        end_s = self.pieces[item.birth].end_s
        needed_later = item.needed_until_s is not None and item.needed_until_s > end_s
        # A cache's hold on it ends with that cache, which a recomputed unit is called without.
        held_longer = item.death > self.last_of_backward(backward) and not item.is_cached
        return None if needed_later or held_longer else unit

    def last_of_backward(self, position: int) -> int:
        """The last segment in which what a unit's backward used may still be dropped: the next one."""
        own = self.pieces[position]
        while position + 1 < len(self.pieces) and _is_of_same(own, self.pieces[position + 1]):
            position += 1
        return position + 1

    def end_of_forward(self, position: int) -> int:
        """The last segment of a micro-batch before its backward."""
        micro_batch = self.pieces[position].micro_batch
        while (
            position + 1 < len(self.pieces)
            and self.pieces[position + 1].phase not in ("backward", "recompute")
            and self.pieces[position + 1].micro_batch == micro_batch
        ):
            position += 1
        return position

    def end_of_cache(self, item: Placed) -> int:
        """The last segment in which autocast's cache may have a weight that it has cast."""
        return self.end_of_forward(item.birth) if item.cached_until is None else item.cached_until

    def segment_at(self, time_s: float) -> int:
        """The segment that contains a time, or ends at it."""
        return bisect_left(self.pieces, time_s, key=lambda piece: piece.start_s) - 1

    def call_in(self, position: int) -> UnitCall:
        """The call of a unit that a segment is of."""
        piece = self.pieces[position]
        return piece.unit or "", piece.call

    def call_at(self, call: ModuleCall) -> UnitCall:
        """Which of its unit's calls a unit's own is."""
        position = self.forward_at(call.start_s)
        return (call.unit, 0) if position is None else self.call_in(position)

    def call_of(self, saved: Saved) -> UnitCall:
        """The call of a unit that has saved something."""
        unit, call = self.call_in(max(0, self.segment_at(saved.saved_s)))
        return saved.unit, call if unit == saved.unit else 0

    def forward_at(self, time_s: float | None) -> int | None:
        """The forward segment of a whole unit that contains a time."""
        if time_s is None:
            return None
        position = self.segment_at(time_s)
        return position if position in self.forward else None


def _is_of_same(one: Stretch, other: Stretch) -> bool:
    """Two pieces in a row, which were cut for another's sake."""
    return (one.phase, one.unit, one.pass_number, one.walk) == (
        other.phase,
        other.unit,
        other.pass_number,
        other.walk,
    )


def place_storages(
    rank: RankRun, step: Step, pieces: Sequence[Stretch], *, tells_caches: bool = False
) -> list[Placed]:
    """Storages of the process's device that live in the step. `tells_caches`: of weights that autocast has cast they say until
    when its cache has them; of those that it still has in a backward they always do."""
    saved_of: dict[int, list[Saved]] = defaultdict(list)
    for saved in rank.saved:
        saved_of[saved.storage_id].append(saved)
    starts = [piece.start_s for piece in pieces]
    taken_s = _calls_with(rank)  # by storage
    cached_s: dict[int, list[float]] = defaultdict(
        list
    )  # by storage, when units' forwards began that have cached it
    for call, tensor in _unit_tensors(rank, "cache"):
        cached_s[tensor.storage_id].append(call.start_s)
    arguments = cast_arguments(rank, _unit_tensors(rank, "late_input"))
    placed = []
    for row in rank.storages:
        if row.device != rank.process.device or (row.death_s is not None and row.death_s <= step.start_s):
            continue
        death = len(pieces)
        if row.death_s is not None and row.death_s < step.end_s:
            death = max(0, bisect_left(starts, row.death_s) - 1)
        is_cached = any(start_s <= row.birth_s for start_s in cached_s[row.storage_id])
        birth = _birth_segment(row, step, pieces, starts)
        kept_for, taken = tuple(saved_of[row.storage_id]), tuple(taken_s[row.storage_id])
        is_cast, cached_until = is_weight_cast(row, rank.parameters), None
        if is_cast and row.last_held_s is not None:
            held_until = bisect_left(starts, row.last_held_s) - 1
            # A backward in the forward's context, as of a loss of several, leaves the cache as it is.
            if tells_caches or any(each.phase == "backward" for each in pieces[birth : held_until + 1]):
                cached_until = held_until
        if row.last_held_s is not None and (
            is_cached  # by that cache, or autocast's, of which more is known
            or is_cast
            or _is_held_again(row.last_held_s, kept_for, pieces, starts)
        ):
            row = replace(row, last_held_s=None)
        is_argument, ends_in_cast = row.storage_id in arguments.casts, arguments.has(row.last_forward_use_s)
        placed.append(
            Placed(
                row,
                birth,
                max(death, birth),
                kept_for,
                taken,
                is_cached,
                is_argument,
                ends_in_cast,
                cached_until,
            )
        )
    return placed


class Placement:
    """Storages of a step's pieces, and all of them that does not change with the size of its micro-batches.

    `freed`: numbers of those that recomputing their unit would free; `casts`: of weights that autocast has cast, that its
    cache holds and that autograd keeps. Their sizes are those that they would have in this precision. `tells_caches`: as of
    `place_storages`.
    """

    def __init__(
        self,
        rank: RankRun,
        step: Step,
        pieces: Sequence[Stretch],
        precision: Precision,
        *,
        tells_caches: bool = False,
    ) -> None:
        self.rank = rank
        self.step = step
        self.pieces = pieces
        self.precision = precision
        self.passes = Passes(pieces, _left_alone(rank), only_repeats=not differentiated_backwards(rank))
        self._whole = place_storages(rank, step, pieces, tells_caches=tells_caches)
        for unit in self.passes.otherwise_asked(self._whole):
            self.passes.leave_out(unit)
        self._shares = narrow_shares(rank, pieces, precision)
        self.freed = {n for n, one in enumerate(self._whole) if self.passes.unit_that_frees(one) is not None}
        cached = cached_casts(rank)
        self.casts = {n for n, one in enumerate(self._whole) if one.saved and one.row.storage_id in cached}

    def num_walks(self) -> Mapping[tuple[str, int | None], int]:
        """Of units' passes that autograd goes through several times, how often."""
        found = ((self.pieces[position], len(walks)) for position, walks in self.passes.walked.items())
        return {(piece.unit, piece.pass_number): num for piece, num in found if piece.unit is not None}

    def with_micro_batches(self, divisor: int | Fraction) -> list[Placed]:
        """All storages, with micro-batches of 1/divisor of their size."""
        sizes = shrink_batch(self.rank, self.step, divisor)
        if not sizes and not self._shares:
            return self._whole
        return [self._resized(one, sizes) for one in self._whole]

    def _resized(self, one: Placed, sizes: Mapping[int, int]) -> Placed:
        row = one.row
        size_bytes = int(sizes.get(row.storage_id, row.size_bytes) * self._shares.get(row.storage_id, 1))
        return one if size_bytes == row.size_bytes else replace(one, row=replace(row, size_bytes=size_bytes))


def _left_alone(rank: RankRun) -> frozenset[str]:
    """Units that others are inside of, and those around whose calls an engine does nothing."""
    by_model: dict[str | None, set[str]] = defaultdict(set)
    for unit in rank.units:
        by_model[unit.model].add(unit.name)
    around = {
        innermost(name.rpartition(".")[0], names) for names in by_model.values() for name in names if name
    }
    return frozenset(name for name in around if name is not None) | modules_left_alone(rank)


def _is_held_again(
    held_s: float, saved: Sequence[Saved], pieces: Sequence[Stretch], starts: Sequence[float]
) -> bool:
    """Whether a checkpoint inside of a unit holds it, whose second forward, in the unit's backward, has saved it anew."""
    piece = pieces[max(0, bisect_left(starts, held_s) - 1)]
    if piece.phase != "backward":
        return False
    return any(row.unit == piece.unit and piece.start_s < row.saved_s <= held_s for row in saved)


def unit_inputs(rank: RankRun) -> Iterator[tuple[ModuleCall, CallTensor]]:
    """What units' forwards were called with, and each time the call."""
    return _unit_tensors(rank, "input")


def _unit_tensors(rank: RankRun, role: str) -> Iterator[tuple[ModuleCall, CallTensor]]:
    units = {unit.name for unit in rank.units}
    calls = {
        call.call_id: call
        for call in rank.module_calls
        if call.phase == "forward" and call.module == call.unit and call.unit in units
    }
    return (
        (calls[row.call_id], row) for row in rank.call_tensors if row.role == role and row.call_id in calls
    )


def _calls_with(rank: RankRun) -> Mapping[int, Sequence[float]]:
    """By storage, when units' forwards were called with it."""
    found: dict[int, list[float]] = defaultdict(list)
    for call, row in unit_inputs(rank):
        found[row.storage_id].append(call.start_s)
    return found


def _birth_segment(row: Storage, step: Step, pieces: Sequence[Stretch], starts: Sequence[float]) -> int:
    """What is born at the very moment a segment ends belongs to that segment if its unit ran there."""
    if row.phase == "baseline" or row.birth_s <= step.start_s:
        return -1
    birth = bisect_right(starts, row.birth_s) - 1
    if birth > 0 and starts[birth] == row.birth_s:
        before = pieces[birth - 1]
        if (before.unit, before.phase) == (row.unit, row.phase):
            return birth - 1
    return birth
