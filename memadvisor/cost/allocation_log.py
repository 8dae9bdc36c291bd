"""Allocations and frees that a simulated training makes, in their order, with what each is of and where it is made."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from memadvisor.cost.allocation_event import BIRTH, FIRST, Event
from memadvisor.cost.allocation_events import StepEvents, Stretch, heirs, renewed_storages
from memadvisor.cost.allocator_replay import Change
from memadvisor.cost.allocator_settings import MIN_BLOCK_BYTES
from memadvisor.cost.moved_activations import Absence
from memadvisor.cost.places import place_in, second_run_of
from memadvisor.cost.state_pieces import STAND_IN, category_of, stream_of
from memadvisor.cost.step import NOTHING, STATES, Bytes, StepStorage
from memadvisor.cost.unit_updates import UnitUpdates, passes_in

_BROADCAST_BYTES = 250 * 2**20  # of torch/nn/parallel/distributed.py

_Owner = tuple[object, ...]


class AllocationLog:
    """Turns what a simulation does into changes. Implements simulation.Watcher.

    `models_states`: parameters, gradients and optimizer state are those of `tensors`; the captured ones are left
    out, but for gradients at their birth, which are there until something takes them over, and for parameters and
    gradients of units that are `as_captured`. `absences`: by number of the
    storage, what is on another tier meanwhile. `streams`: of `tensors`, by how their names begin; 0 of the others.
    `updates`: of units that are updated by themselves; None where none is. `keeps_gradients`: those of `tensors` are the
    captured ones, until they are reduced. `first_parameters`: by unit the bytes of the script's own, which are there before
    the engine's take their place.
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
        updates: UnitUpdates | None = None,
        keeps_gradients: bool = False,
        first_parameters: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.changes: list[Change] = []
        self.is_traced = False  # as the captured step was, which is not quite like the others
        self._storages = storages
        self._streams = streams
        self._first: list[_Owner] = []  # before any step
        self._absences = absences or {}
        self._updates = updates
        self._keeps_gradients = keeps_gradients
        self._passing: list[int] = []  # gradients that are there, until something takes them over
        self._made: list[list[_Owner]] = []  # in the first step, of units whose state is being put away
        self._segments = segments
        self._models_states = models_states
        self._as_captured = as_captured
        self._events = events
        self._due: list[tuple[float, list[Event]]] = []  # runs again that are yet to come
        self._alive: dict[_Owner, int] = {}  # owner -> number of its allocation
        self._old: dict[object, list[int]] = defaultdict(list)  # what an earlier step left for this number
        self._tensors: dict[tuple[str, str], int] = {}
        self._told: object = None  # what those came of
        self._pieces: dict[tuple[str, str], list[_Owner]] = {}
        self._num_allocated = 0
        self._num_steps = 0  # that have ended
        self._place = "the start"
        self._has_stepped = not any(segment.phase == "optimizer" for segment in segments)
        self._has_gradients = False
        self._heirs = heirs(storages)
        self._renewed = renewed_storages(storages, len(segments), self._is_modelled)
        self._first_parameters = first_parameters
        self._own: dict[str, list[_Owner]] = {unit: [] for unit in first_parameters}
        for number, item in enumerate(storages):
            if item.birth_segment >= 0:
                continue
            if item.category == "parameter" and item.owner in self._own:
                self._own[item.owner].append(self._begin(item.size_bytes))
            elif self._is_there_first(number):
                self._allocate((number, FIRST), item.size_bytes, item.category, item.stream)
        for unit in [unit for unit, owners in self._own.items() if not owners]:
            self._own[unit] = [self._begin(size) for size in first_parameters[unit]]

    def start(self, stages: Mapping[str, int], tensors: Mapping[tuple[str, str], int]) -> None:
        """The script's first parameters are broadcast, and move into the engine's storage, one unit's after another's: of the
        `stages` by unit 1 and 2 have the whole flat then, and 3 has it until there is a shard; 0 leaves them where they are.
        """
        left_bytes = sum(map(sum, self._first_parameters.values()))
        while left_bytes > 0:
            self._allocate(("broadcast",), min(left_bytes, _BROADCAST_BYTES), "communication")
            self._free(("broadcast",))
            left_bytes -= _BROADCAST_BYTES
        for unit, owners in self._own.items():
            whole_bytes, key = sum(self._first_parameters[unit]), ("parameter", unit)
            moved = {each: tensors[each] for each in (key, (STAND_IN, unit)) if each in tensors}
            if not stages.get(unit) and whole_bytes == tensors.get(key):
                self._pieces[key] = [self._renamed(owner, ("own", *owner)) for owner in owners]
                self._tensors = {**self._tensors, key: whole_bytes}
            elif stages.get(unit) == 3:
                full = self._begin(max(1, whole_bytes))
                self._free_all(owners)
                self.states({**self._tensors, **moved})
                self._free(full)
            else:
                self.states({**self._tensors, **moved})
                self._free_all(owners)

    def put_away(self, tensors: Mapping[tuple[str, str], int]) -> None:
        """The script's first parameters go to another tier, one unit's after another's: what stands for them is there, then
        they are free, and then a flat is made, whose memory goes at once.
        """
        there = self._tensors
        for unit, owners in self._own.items():
            there = {**there, (STAND_IN, unit): tensors.get((STAND_IN, unit), 0)}
            self.states(there)
            self._free_all(owners)
            self._free(self._begin(max(1, sum(self._first_parameters[unit]))))

    def _begin(self, size_bytes: int) -> _Owner:
        owner = ("first", len(self._first))
        self._first.append(owner)
        self._allocate(owner, size_bytes, "parameter")
        return owner

    def has_started(self) -> None:
        self._free_all(self._first)

    # ---- what a simulation tells -------------------------------------------------------------------

    def place(self, words: str) -> None:
        self._place = words

    def states(self, tensors: Mapping[tuple[str, str], int], beside: Bytes = NOTHING) -> None:
        """What is new is allocated before what is old goes; what grows gets another piece."""
        if not self._models_states:
            return
        told = tensors, self._has_gradients, self._has_stepped, self._num_steps
        if told == self._told and not beside:
            return
        self._told = told
        passing: list[_Owner] = [("beside", category) for category, size in beside.items() if size]
        for owner in passing:
            self._allocate(owner, beside[str(owner[1])], str(owner[1]))
        wanted = {key: size for key, size in tensors.items() if self._exists(*key)}
        gone = []
        for key, size in wanted.items():
            had = self._tensors.get(key, 0)
            if size != had:
                gone += self._pieces.pop(key, []) if size < had else []
                self._pieces.setdefault(key, []).extend(
                    self._piece(key, each) for each in self._parts(*key, size - had if size > had else size)
                )
        for key in self._tensors.keys() - wanted.keys():
            gone += self._pieces.pop(key)
        self._free_all([*gone, *passing])
        self._tensors = wanted

    def _parts(self, what: str, where: str, size_bytes: int) -> list[int]:
        """The bytes of one of the `tensors` by allocation: each parameter that is released has a block that stands for it,
        and the optimizer makes its state for pieces of parameters."""
        if what == STAND_IN and size_bytes % MIN_BLOCK_BYTES == 0:
            return [MIN_BLOCK_BYTES] * (size_bytes // MIN_BLOCK_BYTES)
        if what == "optimizer_state" and self._updates is not None:
            return self._updates.parts(where, size_bytes)
        return [size_bytes]

    def _piece(self, key: tuple[str, str], size_bytes: int) -> _Owner:
        owner = ("piece", self._num_allocated)
        self._allocate(owner, size_bytes, category_of(key[0]), stream_of(key, self._streams))
        return owner

    def recomputation(self, position: int) -> None:
        """Where the backward is known to ask for it later, it runs then."""
        asked_s = self._events.asked_s.get(position, -math.inf)
        self._due = [(asked_s, self._events.again.get(position, []))]
        self._run_again(position, -math.inf)

    def _run_again(self, position: int, time_s: float) -> None:
        while self._due and self._due[0][0] <= time_s:
            place, self._place = self._place, second_run_of((self._segments[position].unit or "",))
            for event in self._due.pop(0)[1]:
                self._play(event, 1.0)
            self._place = place

    def segment(self, position: int, tensors: Mapping[tuple[str, str], int], share: float) -> None:
        """`share` scales what is born in it."""
        phase = self._segments[position].phase
        self._place = place_in(phase, self._segments[position].unit)
        self._due += self._events.of_parts.get(position, [])
        self._has_gradients |= phase == "backward"
        if phase == "optimizer":
            self._put_away(0)
        if phase == "optimizer" and not self._has_stepped:
            self._has_stepped = True
            self._first_states()
            self.states(tensors)
        gradients = self._new_gradients(position)
        if phase == "backward" and not gradients and not self._passing:
            self.states(tensors)  # they cannot be told from other temporaries, so their buffer is there first
        for event in self._events.of[position]:
            self._run_again(position, event.time_s)
            is_birth, number = event.kind == BIRTH, event.number
            item = self._storages[number]
            is_others = is_birth and not self._is_modelled(item)
            self._hand_over(tensors, (position, event.time_s), is_over=is_others)
            if self._is_modelled(item):
                if is_birth and number in gradients:
                    self._passing.append(number)
                    self._allocate(("passing", number), item.size_bytes, item.category, item.stream)
                continue
            if phase != "optimizer" or self._updates is None or not self._updates.are_told:
                self._play(event, share)
            elif self._updates.unit_of(number) not in self._updates.apart:
                self._play(event, self._updates.share(number, share))
        self._run_again(position, math.inf)
        if self._keeps_gradients:
            self._take(self._passing, tensors)
        self._hand_over(tensors, (position, math.inf), is_over=True, is_last=True)
        self.states(tensors)

    def _hand_over(
        self,
        tensors: Mapping[tuple[str, str], int],
        now: tuple[int, float],
        *,
        is_over: bool,
        is_last: bool = False,
    ) -> None:
        """Gradients pass into the buffers that collect them: when autograd adds them to those of parameters; where that is not
        known, when the operator that made them `is_over`, as something else is born."""
        if not self._passing or (self._keeps_gradients and not is_last):
            return
        times = ((number, self._storages[number].accumulated) for number in self._passing)
        due = [number for number, at in times if (is_over if at is None else at <= now)]
        if due:
            self._passing = [number for number in self._passing if number not in due]
            for number in due:
                item = self._storages[number]
                key = ("gradient", item.owner or "")
                # A unit's only gradient becomes its buffer.
                if tensors.get(key) == item.size_bytes and key not in self._tensors and self._exists(*key):
                    self._keep(number, key)
            self.states(tensors)
            self._free_all([("passing", number) for number in due])

    def _take(self, passing: list[int], tensors: Mapping[tuple[str, str], int]) -> None:
        """Gradients that have come stay as they are: each is one of the new `tensors` of as many bytes."""
        self._told = None
        alike: dict[int, list[int]] = defaultdict(list)
        for number in passing:
            alike[self._storages[number].size_bytes].append(number)
        for key, size_bytes in tensors.items():
            if key[0] == "gradient" and key not in self._tensors and alike[size_bytes]:
                number = alike[size_bytes].pop(0)
                passing.remove(number)
                self._keep(number, key)

    def _keep(self, number: int, key: tuple[str, str]) -> None:
        """A gradient that has come is one of the tensors from here on."""
        kept = self._renamed(("passing", number), ("kept", self._alive["passing", number]))
        self._pieces[key], self._told = [kept], None
        self._tensors = {**self._tensors, key: self._storages[number].size_bytes}

    def update(self, unit: str, share: float, beside: Bytes = NOTHING) -> None:
        """What is born and dies in an optimizer step for this unit, with `share` scaling what cannot be told whose it is, and
        what is there `beside` meanwhile."""
        if self._updates is None:
            raise AssertionError("no unit is updated by itself")
        held: list[_Owner] = [("beside", category) for category, size in beside.items() if size]
        for owner in held:
            self._allocate(owner, beside[str(owner[1])], str(owner[1]))
        if unit in self._updates.fetched and not self._num_steps:
            self._make_states(unit, self._updates.made(unit))
        self._first_states(unit)
        for position, segment in enumerate(self._segments):
            for event in self._events.of[position] if segment.phase == "optimizer" else ():
                item, of = self._storages[event.number], self._updates.unit_of(event.number)
                if of in (unit, None) and passes_in(item, {position}) and not self._is_modelled(item):
                    self._play(event, self._updates.share(event.number, share))
        self._free_all(held)
        self._put_away(0 if self._updates.fetched.get(unit) else 1)

    def _make_states(self, unit: str, sizes: Sequence[int]) -> None:
        """The optimizer makes them in its first step; later ones find them in buffers."""
        owners: list[_Owner] = [("made", unit, place) for place in range(len(sizes))]
        self._made.append(owners)
        for owner, size_bytes in zip(owners, sizes, strict=True):
            self._allocate(owner, size_bytes, "optimizer_state")

    def _put_away(self, num_left: int) -> None:
        """All but those of the last so many units are where they stay."""
        while len(self._made) > num_left:
            self._free_all(self._made.pop(0))

    def end_step(self) -> None:
        """What this step leaves is what the next one finds and frees, under the number of the found."""
        for found, left in self._renewed.items():
            self._free((found, FIRST))
            for number in left:
                name = self._alive.pop((number, FIRST), None)
                if name is not None:
                    self._old[found].append(name)
        self._num_steps += 1

    # ---- inside ------------------------------------------------------------------------------------

    def _new_gradients(self, position: int) -> set[int]:
        if self._segments[position].phase != "backward":
            return set()
        births = (event.number for event in self._events.of[position] if event.kind == BIRTH)
        return {number for number in births if self._storages[number].category == "gradient"}

    def _is_there_first(self, number: int) -> bool:
        """Whether a storage from before the captured step was there before the first one."""
        item = self._storages[number]
        if self._is_modelled(item) or item.comes is not None:
            return False
        return number not in self._renewed and (item.category != "optimizer_state" or self._has_stepped)

    def _first_states(self, unit: str | None = None) -> None:
        """The optimizer makes its states, of what does not have them yet: of one unit that is updated by itself, or of all."""
        for number, item in enumerate(() if self._models_states or self._num_steps else self._storages):
            is_state = item.birth_segment < 0 and item.category == "optimizer_state"
            if is_state and unit in (None, item.owner) and (number, FIRST) not in self._alive:
                self._allocate((number, FIRST), item.size_bytes, item.category, item.stream)

    def _is_modelled(self, item: StepStorage) -> bool:
        """Whether it is one of the `tensors`, as they are called above."""
        is_own = item.category in ("parameter", "gradient") and item.owner in self._as_captured
        return self._models_states and item.category in STATES and not is_own

    def _exists(self, what: str, where: str) -> bool:
        if what in ("parameter", "gradient") and where in self._as_captured:
            return False  # they are played as captured
        if what == "gradient":
            return self._has_gradients
        if what == "fetched optimizer_state" and not self._num_steps:
            return False
        return self._has_stepped or not what.endswith("optimizer_state")

    def _play(self, event: Event, share: float) -> None:
        _, kind, number, run = event
        if kind == BIRTH:
            item = self._storages[number]
            if item.comes is not None and (number, FIRST) in self._alive:
                return  # since an earlier step
            if not self.is_traced and (item.in_place_of, run) in self._alive:
                self._hand_on((item.in_place_of, run), (number, run))
                return
            size_bytes = max(1, math.ceil(item.size_bytes * share))
            first = item.in_place_of if self._heirs.get(item.in_place_of) is item else None
            is_aside = (first, run) in self._alive
            self._allocate((number, run), size_bytes, item.category, item.stream, is_aside=is_aside)
            if is_aside:
                self._free((first, run))
        elif number not in self._heirs or self._is_modelled(self._heirs[number]):
            self._free((number, run))

    def _hand_on(self, owner: _Owner, to: _Owner) -> None:
        """What one has is another's from here on."""
        old, self._alive[to] = self._alive.pop(to, None), self._alive.pop(owner)
        if old is not None:
            self._drop(old)

    def _renamed(self, owner: _Owner, to: _Owner) -> _Owner:
        self._alive[to] = self._alive.pop(owner)
        return to

    def _allocate(
        self, owner: _Owner, size_bytes: int, category: str, stream: int = 0, *, is_aside: bool = False
    ) -> None:
        """An owner that has something already drops it once the new one is there."""
        old = self._alive.get(owner)
        self._num_allocated += 1
        self._alive[owner] = name = self._num_allocated
        change = Change(name, size_bytes, stream, category, self._place, self._num_steps, is_aside)
        self.changes.append(change)
        if old is not None:
            self._drop(old)

    def _free(self, owner: _Owner) -> None:
        name = self._alive.pop(owner, None)
        if name is not None:
            self._drop(name)
        for old in self._old.pop(owner[0], ()):
            self._drop(old)

    def _drop(self, name: int) -> None:
        self.changes.append(Change(name, 0, step=self._num_steps))

    def _free_all(self, owners: list[_Owner]) -> None:
        for owner in owners:
            self._free(owner)
        owners.clear()
