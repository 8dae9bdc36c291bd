"""What autograd keeps of units whose activations wait on another tier: when it leaves memory, and when it is back.

The law of the moments, as memadvisor/engines/activations/offloaded_activations.py plays a schedule (write_transfers.py):

- *What goes*: storages of at least MIN_BYTES that a call of a unit's forward saves (`SavedStorages.movable_by`), each once
  however many calls save it. Of a unit that is recomputed, what it keeps: its inputs that need a gradient
  (`SavedStorages.taken_by`), and outputs of operators (`kept_storages`).
- *Leaving*: the write begins after the forward of the first unit that saves a storage, and is waited for after the forward
  of the unit behind it, or if there is none where a backward begins, be it another micro-batch's, or after its own next
  forward. From the next segment on the storage is gone,
  unless somebody else holds it: the forward that still uses it, a unit that saves it and keeps what it saves, a
  recomputed unit that takes it as input, the script, autocast's cache. Then it goes when the last of these lets go.
- *Coming back*: all that a unit keeps is asked for before the backward of the unit behind it (before its own, if there is
  none), and takes memory at once; of several units that save a storage the first one to ask in the backward counts. What
  is still in memory then stays, and is not read. It dies where it was captured to die.
- *Waiting*: transfers of a lane go one after another. Compute waits for a unit's write as above, and for its reads in
  its own backward, or before it in the unit's second run, storage by storage: it is taken to use them at an even pace,
  in the order in which they come.
- *The engine itself* takes time of the thread that computes for each storage, as it is sent and as it is asked for, where
  calibrate has measured it (hardware.PagingCost).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from memadvisor.cost.kept import KeepableStorage
from memadvisor.cost.lanes import Lanes
from memadvisor.cost.saved import MIN_BYTES, SavedStorages, UnitCall
from memadvisor.cost.step import CapturedStep, Segment, pass_number
from memadvisor.cost.stretches import Stretches
from memadvisor.cost.transfers import TransferTimes
from memadvisor.schedule import Action, ActionKind, Lane, Point, Schedule

TRANSFERS = frozenset((ActionKind.OFFLOAD, ActionKind.PREFETCH))


@dataclass(frozen=True, slots=True)
class Away:
    """A unit whose activations wait on a lane's tier. `gone_after`: the unit after whose forward their memory is free;
    None: where the backward begins. `back_before`: units before whose backward they are asked for."""

    lane: Lane
    gone_after: str | None
    back_before: tuple[str, ...]


def units_away(schedule: Schedule) -> dict[str, Away]:
    """By name, the units whose activations a schedule puts elsewhere."""
    if all(unit.activation_tier == "device" for unit in schedule.units):
        return {}
    lanes: dict[str, Lane] = {}
    gone_after: dict[str, str] = {}
    back_before: dict[str, list[str]] = defaultdict(list)
    for boundary, actions in schedule.actions.items():
        if boundary.point not in (Point.AFTER_FORWARD, Point.BEFORE_BACKWARD):
            continue
        for action in actions:
            if action.kind is ActionKind.PREFETCH:
                back_before[action.unit].append(boundary.unit)
            elif action.kind is ActionKind.OFFLOAD and action.overlaps:
                lanes[action.unit] = action.lane
            elif action.kind is ActionKind.OFFLOAD:
                gone_after[action.unit] = boundary.unit
    return {unit: Away(lane, gone_after.get(unit), tuple(back_before[unit])) for unit, lane in lanes.items()}


@dataclass(frozen=True, slots=True)
class Absence:
    """Storages that a schedule moves: out of memory from the start of segment `first` to the end of `last`.

    `written_by`: the call of a unit after which they are sent. `read_for`: the one whose backward asks for them first.
    """

    storages: SavedStorages
    first: int
    last: int
    written_by: UnitCall
    read_for: UnitCall

    @property
    def is_away(self) -> bool:
        """Whether they ever leave, be it for no segment at all. Else they are written, and never read."""
        return self.first <= self.last + 1


def absence_of(
    storages: SavedStorages, step: CapturedStep, away: Mapping[str, Away], stretches: Stretches
) -> Absence | None:
    """When storages are elsewhere, if units in `away` have theirs there; None where none of them moves these."""
    movers = [call for call in storages.movable_by if call[0] in away and call[0] not in stretches]
    movers += [call for call in storages.taken_by if call[0] in away and call[0] in stretches]
    if not movers:
        return None
    if len(movers) > 1:
        movers.sort(key=lambda call: _forward_of(step, call, storages))
    back = {call: _asked_for(step, call, storages, away[call[0]]) for call in movers}
    read_for = min(movers, key=lambda call: back[call])
    waited = _waited_for(step, movers[0], storages, away[movers[0][0]])
    held_until = max(waited, _held_until(storages, movers, stretches))
    return Absence(storages, held_until + 1, back[read_for] - 1, movers[0], read_for)


def _forward_of(step: CapturedStep, call: UnitCall, storages: SavedStorages) -> int:
    unit, number = call
    return step.forward_at.get((unit, pass_number(storages.micro_batch, number)), 0)


def _waited_for(step: CapturedStep, call: UnitCall, storages: SavedStorages, away: Away) -> int:
    """Until when a call's write may go on."""
    own = max(storages.birth_segment, _forward_of(step, call, storages))
    names = (call[0],) if away.gone_after is None else (away.gone_after, call[0])
    ends = [begins - 1 for begins in step.backward_begins.values() if begins > own]
    ends += [behind for name in names if (behind := _next_forward(step, name, own)) is not None]
    return min(ends, default=len(step.segments) - 1)


def _asked_for(step: CapturedStep, call: UnitCall, storages: SavedStorages, away: Away) -> int:
    """Where the first backward begins before which the schedule asks for what a call keeps: its own, or that of a call that
    found it to be the unit's last."""
    unit, number = call
    never = len(step.segments)
    own = _forward_of(step, call, storages)
    next_own = _next_forward(step, unit, own)
    asking = [step.backwards.get((unit, pass_number(storages.micro_batch, number)), never)]
    for name in away.back_before:
        for position, other in step.forwards_of.get(name, ()):
            if own < position < (never if next_own is None else next_own):
                asking.append(step.backwards.get((name, other), never))
    return min(asking)


def _next_forward(step: CapturedStep, unit: str, position: int) -> int | None:
    passes = step.forwards_of.get(unit, ())
    place = bisect_right(passes, position, key=lambda found: found[0])
    return passes[place][0] if place < len(passes) else None


def _held_until(storages: SavedStorages, movers: list[UnitCall], stretches: Stretches) -> int:
    """The last segment in which anybody but the calls that move them holds storages."""
    holds = [storages.held_until]
    holds += [
        until
        for call, until in storages.saved_until.items()
        if call not in movers and call[0] not in stretches
    ]
    holds += [
        until
        for call, until in storages.input_of.items()
        if call[0] in stretches and call not in movers and not _makes_again(storages, call, stretches)
    ]
    return max(holds)


def _makes_again(storages: SavedStorages, call: UnitCall, stretches: Stretches) -> bool:
    """Whether what a call of a recomputed unit takes is made in the run that runs it again."""
    maker = storages.maker
    if maker is None or (maker[0] == call[0] and maker != call):  # an earlier call
        return False
    return maker[0] in stretches.around(call[0])[0]


def kept_storages(
    step: CapturedStep, position: int, storages: Iterable[KeepableStorage]
) -> Iterator[SavedStorages]:
    """What a recomputed unit keeps of its operators' outputs in forward `position`, as what it alone takes with it."""
    segment = step.segments[position]
    for storage in storages:
        if segment.unit is not None and storage.size_bytes >= MIN_BYTES:
            yield SavedStorages(
                category=storage.category,
                dtype="",
                size_bytes=storage.size_bytes,
                num_storages=1,
                micro_batch=segment.micro_batch,
                birth_segment=position,
                death_segment=step.backwards.get((segment.unit, segment.pass_number), len(step.segments)),
                saved_until={},
                movable_by=(),
                held_until=position,
                input_of={},
                maker=(segment.unit, segment.call),
                taken_by=((segment.unit, segment.call),),
            )


class Moves:
    """All that a schedule moves of a step. Bytes by unit and pass.

    `kept`: by forward segment, what recomputed units keep of their operators' outputs.
    """

    def __init__(
        self,
        step: CapturedStep,
        away: Mapping[str, Away],
        stretches: Stretches,
        kept: Mapping[int, Iterable[KeepableStorage]] | None = None,
    ) -> None:
        outputs = (
            storages
            for position, found in (kept or {}).items()
            if step.segments[position].unit in away
            for storages in kept_storages(step, position, found)
        )
        going = chain(step.saved, outputs) if away else ()
        found = (absence_of(storages, step, away, stretches) for storages in going)
        self.absences = tuple(absence for absence in found if absence is not None)

    @cached_property
    def written(self) -> Mapping[tuple[str, int | None], Transfer]:
        return _sums((absence.written_by, absence.storages) for absence in self.absences)

    @cached_property
    def read(self) -> Mapping[tuple[str, int | None], Transfer]:
        return _sums((absence.read_for, absence.storages) for absence in self.absences if absence.is_away)


@dataclass(frozen=True, slots=True)
class Transfer:
    """What goes at one time."""

    size_bytes: int = 0
    num_storages: int = 0


def _sums(found: Iterator[tuple[UnitCall, SavedStorages]]) -> dict[tuple[str, int | None], Transfer]:
    sums: dict[tuple[str, int | None], Transfer] = {}
    for (unit, call), storages in found:
        key = unit, pass_number(storages.micro_batch, call)
        known = sums.get(key, Transfer())
        sums[key] = Transfer(
            known.size_bytes + storages.size_bytes, known.num_storages + storages.num_storages
        )
    return sums


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Reads that end at `end_s`, of `num_storages` that take `duration_s` in all."""

    end_s: float
    duration_s: float
    num_storages: int


@dataclass(slots=True)
class MovedActivations:
    """The time of a schedule's transfers of activations, while it is played."""

    step: CapturedStep
    moves: Moves
    lanes: Lanes
    times: TransferTimes | None  # of all lanes that anything goes by
    using_s: Callable[[Segment], float]  # what a backward takes to use what has been kept for it
    _leaving_s: dict[str, float] = field(default_factory=dict)
    _arriving: dict[tuple[str, int | None], _Arriving] = field(default_factory=dict)

    def play_all(self, actions: Iterable[Action], segment: Segment) -> None:
        """Those among the actions at the boundary of one of several calls of a unit."""
        for action in actions:
            if action.kind in TRANSFERS:
                self.play(action, segment)

    def play(self, action: Action, segment: Segment) -> None:
        """One transfer around a forward or backward."""
        if action.kind is ActionKind.OFFLOAD and action.overlaps:
            self._write(action, self.moves.written.get((action.unit, segment.pass_number), Transfer()))
        elif action.kind is ActionKind.OFFLOAD:
            self.lanes.wait_for_transfer(self._leaving_s.pop(action.unit, 0.0))
        else:
            key = action.unit, self._asked_for(action, segment)
            if key not in self._arriving:
                self._read(action, key, self.moves.read.get(key, Transfer()))
            if not action.overlaps:
                self._wait_for(self._arriving.pop(key, None), self.using_s(segment))

    def _asked_for(self, action: Action, segment: Segment) -> int | None:
        """The pass of a unit that is brought back before this backward: its last one before this one's forward."""
        own = self.step.forward_at.get((segment.unit, segment.pass_number))
        if action.unit == segment.unit or own is None:
            return segment.pass_number
        passes = self.step.forwards_of.get(action.unit, ())
        place = bisect_right(passes, own, key=lambda found: found[0])
        return passes[place - 1][1] if place else segment.pass_number

    def _write(self, action: Action, written: Transfer) -> None:
        self.lanes.wait_for_transfer(self._leaving_s.pop(action.unit, 0.0))  # of an earlier call
        if written.size_bytes:
            self._compute(action, written)
            write_s = self._times_of(action).write_s(action.lane, written.size_bytes)
            label = f"{action.kind} of {action.unit}"
            self._leaving_s[action.unit] = self.lanes.transfer(action.lane, label, write_s)

    def _read(self, action: Action, key: tuple[str, int | None], read: Transfer) -> None:
        if read.size_bytes:
            self._compute(action, read)
            read_s = self._times_of(action).read_s(action.lane, read.size_bytes)
            end_s = self.lanes.transfer(action.lane, f"{action.kind} of {action.unit}", read_s)
            self._arriving[key] = _Arriving(end_s, read_s, read.num_storages)

    def _compute(self, action: Action, moved: Transfer) -> None:
        """What the engine itself takes: a half on the way out, and a half on the way back."""
        if self.times is not None and self.times.paging is not None:
            own_s = self.times.paging.moved_s / 2 * moved.num_storages
            self.lanes.compute(f"engine at the {action.kind} of {action.unit}", own_s)

    def _times_of(self, action: Action) -> TransferTimes:
        if self.times is None or action.lane not in self.times.bandwidths:
            raise AssertionError("transfers need bandwidths")
        return self.times

    def _wait_for(self, arriving: _Arriving | None, backward_s: float) -> None:
        """Until the backward that begins now never has to wait for a storage, if it did so all at once here."""
        if arriving is None:
            return
        others = 1 - 1 / arriving.num_storages  # the share of all but one
        first_s = arriving.end_s - arriving.duration_s * others
        self.lanes.wait_for_transfer(max(first_s, arriving.end_s - backward_s * others))
