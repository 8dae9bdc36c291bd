"""The sequence of allocations and frees of a training, from one captured step and what a plan changes of it.

The training is played from its first step on, because what is cached then decides what is reserved later:

- before the first step there is what was alive before the captured one and is not made anew in every step;
- where ranks share, the script's own parameters, which DDP broadcasts in large pieces, make way for the engine's;
- optimizer state comes into being in the first optimizer step, between what the backward has left free;
- what the captured step frees of the step before (gradients) is what it leaves itself, by size and category.

After `NUM_STEPS` steps the reservation has settled: the steps are alike.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from memadvisor.cost.allocation_events import BIRTH, Event, StepEvents, Stretch, renewed_storages
from memadvisor.cost.allocator_replay import Change
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.delayed_memory import memory_of
from memadvisor.cost.fsdp2_memory import streams_of
from memadvisor.cost.moved_activations import Absence, absence_of, units_away
from memadvisor.cost.simulate import simulate
from memadvisor.cost.step import STATES, CapturedStep, StepStorage
from memadvisor.cost.stretches import Stretches
from memadvisor.cost.transfers import TransferTimes
from memadvisor.schedule import Schedule, updated_at_step

NUM_STEPS = 3
_BROADCAST_BYTES = 250 * 2**20  # of torch/nn/parallel/distributed.py

_Owner = tuple[object, ...]


def captured_sequence(storages: Sequence[StepStorage], segments: Sequence[Stretch]) -> list[Change]:
    """The training as it was captured."""
    log = AllocationLog(storages, StepEvents(storages, segments, (), {}, {}), segments, models_states=False)
    for _ in range(NUM_STEPS):
        for position in range(len(segments)):
            log.segment(position, {}, 1.0)
        log.end_step()
    return log.changes


def planned_sequence(
    step: CapturedStep,
    schedule: Schedule,
    times: CollectiveTimes | None,
    transfers: TransferTimes | None = None,
) -> list[Change]:
    """The training under a schedule: recomputed units allocate twice, and engines hold what they hold."""
    # One process alone keeps its states as captured, but for what lies elsewhere; else they are the engine's.
    models_states = schedule.num_ranks > 1 or step.world_size > 1 or bool(schedule.offloaded_states)
    stretches = Stretches(schedule.stretches)
    if not stretches.are_alone:
        raise AssertionError("what stretches of several units reserve is not known")
    recomputed = frozenset(stretches.units)
    away = units_away(schedule)
    absences = {
        number: absence
        for number, item in enumerate(step.storages if away else ())
        if item.saved is not None and (absence := absence_of(item.saved, step, away, stretches)) is not None
    }
    asked_s = {n: line.asked_s for n, line in enumerate(step.timelines) if line.asked_s is not None}
    log = AllocationLog(
        step.storages,
        StepEvents(step.storages, step.segments, recomputed, absences, asked_s),
        step.segments,
        models_states=models_states,
        as_captured=_as_captured(step, schedule),
        absences=absences,
        streams=streams_of(step, schedule),
    )
    if models_states:
        if schedule.num_ranks > 1 and schedule.executor != "fsdp2":
            sharded = {unit.name for unit in schedule.units if unit.stage_on(schedule.shard_ranks) == 3}
            log.start(_parameters(step), sharded)
        log.states(memory_of(step, schedule).tensors())
        log.has_started()
    for number in range(NUM_STEPS):
        # Before it updates in the backward, the engine sees one step through.
        simulate(step, schedule if number else updated_at_step(schedule), times, log, transfers=transfers)
        log.end_step()
    return log.changes


def _as_captured(step: CapturedStep, schedule: Schedule) -> frozenset[str]:
    """Units whose parameters and gradients are the script's own tensors, whatever is done to their optimizer's state."""
    if schedule.num_ranks > 1 or step.world_size > 1:
        return frozenset()
    return frozenset(unit.name for unit in schedule.units if unit.parameter_tier == "device")


def _parameters(step: CapturedStep) -> dict[str, list[int]]:
    """Bytes of each parameter, by unit."""
    sizes = {
        name: [parameter.size_bytes for parameter in states.parameters]
        for name, states in step.states.items()
    }
    return {name: [size for size in found if size > 0] for name, found in sizes.items()}


class AllocationLog:
    """Turns what a simulation does into changes. Implements simulation.Watcher.

    `models_states`: parameters, gradients and optimizer state are those of `tensors`; the captured ones are left
    out, but for gradients at their birth, which are there until something takes them over, and for parameters and
    gradients of units that are `as_captured`. `absences`: by number of the
    storage, what is on another tier meanwhile. `streams`: of `tensors`, by how their names begin; 0 of the others.
    """

    def __init__(
        self,
        storages: Sequence[StepStorage],
        events: StepEvents,
        segments: Sequence[Stretch],
        *,
        models_states: bool,
        as_captured: Collection[str] = (),
        absences: Mapping[int, Absence] | None = None,
        streams: Mapping[tuple[str, str], int] = MappingProxyType({}),
    ) -> None:
        self.changes: list[Change] = []
        self._storages = storages
        self._streams = streams
        self._first: list[_Owner] = []  # before any step
        self._absences = absences or {}
        self._segments = segments
        self._models_states = models_states
        self._as_captured = as_captured
        self._events = events
        self._due: tuple[float, list[Event]] | None = None  # a run again that is yet to come
        self._alive: dict[_Owner, int] = {}  # owner -> number of its allocation
        self._old: dict[object, list[int]] = defaultdict(list)  # what an earlier step left for this number
        self._tensors: dict[tuple[str, str], int] = {}
        self._pieces: dict[tuple[str, str], list[_Owner]] = {}
        self._num_allocated = 0
        self._has_stepped = not any(segment.phase == "optimizer" for segment in segments)
        self._has_gradients = False
        self._renewed = renewed_storages(storages, len(segments), self._is_modelled)
        for number, item in enumerate(storages):
            if item.birth_segment < 0 and self._is_there_first(number):
                self._allocate((number, False), item.size_bytes, item.stream)

    def start(self, parameters: Mapping[str, Sequence[int]], sharded: Collection[str]) -> None:
        """The script's `parameters`, by unit their bytes, are broadcast; those of `sharded` units make way, one unit after
        another, for as much, and all that is there stays until it `has_started`.
        """
        own = {unit: [self._begin(size) for size in sizes] for unit, sizes in parameters.items()}
        left_bytes = sum(map(sum, parameters.values()))
        while left_bytes > 0:
            self._allocate(("broadcast",), min(left_bytes, _BROADCAST_BYTES), 0)
            self._free(("broadcast",))
            left_bytes -= _BROADCAST_BYTES
        for unit in (name for name in own if name in sharded):
            for size_bytes in parameters[unit]:
                self._begin(size_bytes)
            self._free_all(own[unit])

    def _begin(self, size_bytes: int) -> _Owner:
        owner = ("first", len(self._first))
        self._first.append(owner)
        self._allocate(owner, size_bytes, 0)
        return owner

    def has_started(self) -> None:
        self._free_all(self._first)

    # ---- what a simulation tells -------------------------------------------------------------------

    def states(self, tensors: Mapping[tuple[str, str], int]) -> None:
        """What is new is allocated before what is old goes; what grows gets another piece."""
        if not self._models_states:
            return
        wanted = {key: size for key, size in tensors.items() if self._exists(*key)}
        gone = []
        for key, size in wanted.items():
            had = self._tensors.get(key, 0)
            if size != had:
                gone += self._pieces.pop(key, []) if size < had else []
                owner = ("piece", self._num_allocated)
                self._allocate(owner, size - had if size > had else size, self._stream_of(key))
                self._pieces.setdefault(key, []).append(owner)
        for key in self._tensors.keys() - wanted.keys():
            gone += self._pieces.pop(key)
        self._free_all(gone)
        self._tensors = wanted

    def recomputation(self, position: int) -> None:
        """Where the backward is known to ask for it later, it runs then."""
        asked_s = self._events.asked_s.get(position, -math.inf)
        self._due = asked_s, self._events.again.get(position, [])
        self._run_again(-math.inf)

    def _run_again(self, time_s: float) -> None:
        if self._due is not None and self._due[0] <= time_s:
            events, self._due = self._due[1], None
            for event in events:
                self._play(event, 1.0)

    def segment(self, position: int, tensors: Mapping[tuple[str, str], int], share: float) -> None:
        """`share` scales what is born in it."""
        phase = self._segments[position].phase
        self._has_gradients |= phase == "backward"
        if phase == "optimizer" and not self._has_stepped:
            self._first_optimizer_step()
            self.states(tensors)
        gradients = self._new_gradients(position)
        if phase == "backward" and not gradients:
            self.states(tensors)  # they cannot be told from other temporaries, so their buffer is there first
        passing: list[_Owner] = []
        for event in self._events.of[position]:
            self._run_again(event.time_s)
            is_birth, number = event.kind == BIRTH, event.number
            item = self._storages[number]
            if self._is_modelled(item):
                if is_birth and number in gradients:
                    passing.append(("passing", number))
                    self._allocate(passing[-1], item.size_bytes, item.stream)
                continue
            if is_birth and passing:
                self.states(tensors)  # the buffer that collects them
                self._free_all(passing)
            self._play(event, share)
        self._run_again(math.inf)
        self.states(tensors)
        self._free_all(passing)

    def update(self, share: float) -> None:
        """A part of an optimizer step, elsewhere: what is born and dies in one, with `share` scaling it."""
        for segment, events in zip(self._segments, self._events.of, strict=True):
            for event in events if segment.phase == "optimizer" else ():
                item = self._storages[event.number]
                passes = item.birth_segment == item.death_segment
                if passes and not self._is_modelled(item):
                    self._play(event, share)

    def end_step(self) -> None:
        """What this step leaves is what the next one finds and frees, under the number of the found."""
        for found, left in self._renewed.items():
            self._free((found, False))
            for number in left:
                name = self._alive.pop((number, False), None)
                if name is not None:
                    self._old[found].append(name)

    # ---- inside ------------------------------------------------------------------------------------

    def _new_gradients(self, position: int) -> set[int]:
        if self._segments[position].phase != "backward":
            return set()
        births = (event.number for event in self._events.of[position] if event.kind == BIRTH)
        return {number for number in births if self._storages[number].category == "gradient"}

    def _is_there_first(self, number: int) -> bool:
        """Whether a storage from before the captured step was there before the first one."""
        item = self._storages[number]
        if self._is_modelled(item):
            return False
        return number not in self._renewed and (item.category != "optimizer_state" or self._has_stepped)

    def _first_optimizer_step(self) -> None:
        self._has_stepped = True
        for number, item in enumerate(self._storages):
            if item.birth_segment < 0 and item.category == "optimizer_state" and not self._models_states:
                self._allocate((number, False), item.size_bytes, item.stream)

    def _is_modelled(self, item: StepStorage) -> bool:
        """Whether it is one of the `tensors`, as they are called above."""
        is_own = item.category in ("parameter", "gradient") and item.owner in self._as_captured
        return self._models_states and item.category in STATES and not is_own

    def _exists(self, what: str, where: str) -> bool:
        if what in ("parameter", "gradient") and where in self._as_captured:
            return False  # they are played as captured
        if what == "gradient":
            return self._has_gradients
        return self._has_stepped or not what.endswith("optimizer_state")

    def _play(self, event: Event, share: float) -> None:
        _, kind, number, is_again = event
        if kind == BIRTH:
            item = self._storages[number]
            self._allocate((number, is_again), max(1, math.ceil(item.size_bytes * share)), item.stream)
        else:
            self._free((number, is_again))

    def _stream_of(self, key: tuple[str, str]) -> int:
        what, where = key
        return next(
            (
                stream
                for (kind, begin), stream in self._streams.items()
                if what == kind and where.startswith(begin)
            ),
            0,
        )

    def _allocate(self, owner: _Owner, size_bytes: int, stream: int) -> None:
        """An owner that has something already drops it once the new one is there."""
        old = self._alive.get(owner)
        self._num_allocated += 1
        self._alive[owner] = self._num_allocated
        self.changes.append(Change(self._num_allocated, size_bytes, stream))
        if old is not None:
            self.changes.append(Change(old, 0))

    def _free(self, owner: _Owner) -> None:
        name = self._alive.pop(owner, None)
        if name is not None:
            self.changes.append(Change(name, 0))
        if owner[0] in self._old:
            self.changes += [Change(old, 0) for old in self._old.pop(owner[0])]

    def _free_all(self, owners: list[_Owner]) -> None:
        for owner in owners:
            self._free(owner)
        owners.clear()
