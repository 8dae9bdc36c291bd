"""Memory and time of units whose parts keep nothing but what they are called with, and run again before their own
backward (engines/activations/parts.py).

The law of the moments, storage by storage, in times of the traced step:

- In the run that keeps for the backward - the first one, or of a recomputed unit the second - what autograd would keep of
  a part alone goes at its last use in the forward. Copies of weights go with autocast's cache, which holds them until its
  context is left: behind the micro-batch's forward, and of a second run as that ends.
- When autograd first asks for something of a part, the part runs again, with what it has at its highest instant beside
  what is there; from then on all is as in the plain backward.
- What a part keeps to be as it was when it runs again is there from each module's call on, and goes when autograd has let
  go of all that it saved in the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from memadvisor.cost.rounded_activations import Timed
from memadvisor.cost.second_run import SecondRun

Bytes = Mapping[str, int]  # by category
Modules = tuple[str, ...]  # names of a part's modules, in the order of their calls


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that come or go."""

    time_s: float
    delta_bytes: int
    category: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStorage:
    """What autograd keeps of a part alone; `unsaved`: segment and time where it would go if nothing were kept. `number`:
    among the step's storages."""

    number: int
    category: str
    size_bytes: int
    unsaved: tuple[int, float]
    death_segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`asked_s`: when autograd first asks for something of it, and `over_s`: has let go of it all. `growth`: what running
    it again has at its highest instant; `start_s`, `saved_s`: of the forward, what that does again, up to the last
    tensor that it saves. `put_back`: the generator's state, as it was when each module was called, and copies of
    buffers that it changes; `saved_copies`: of these, those that autograd saves when it runs again. `holds_input`: it is
    called with what its unit is called with, and autograd does not keep that for it."""

    modules: Modules
    storages: tuple[PartStorage, ...]
    asked_s: float
    over_s: float
    start_s: float
    saved_s: float
    growth: Bytes
    put_back: tuple[Change, ...]
    run: SecondRun
    holds_input: bool = False
    saved_copies: tuple[Change, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(storage.size_bytes for storage in self.storages)

    @property
    def put_back_bytes(self) -> int:
        return sum(change.delta_bytes for change in self.put_back)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartedPass:
    """A pass of a unit with parts: segments of its forward and backward, and what its forward brings into being until it
    has saved its last tensor. `random_state_bytes`: of the device's memory, what a generator's state takes."""

    unit: str
    forward: int
    backward: int
    parts: tuple[Part, ...]
    own: tuple[Change, ...]
    random_state_bytes: int

    def with_parts(self, parts: Iterable[Part]) -> PartedPass:
        return replace(self, parts=tuple(parts))

    @property
    def modules(self) -> tuple[Modules, ...]:
        return tuple(part.modules for part in self.parts)

    @property
    def put_back_bytes(self) -> int:
        return sum(part.put_back_bytes for part in self.parts)

    def growth(self) -> dict[str, int]:
        """What the second run of the unit has at its highest instant."""
        return highest({}, self.own, self._forward_changes())

    def forward_peak(self, start: Bytes, events: Sequence[Timed]) -> dict[str, int]:
        """The first run, where it keeps for the backward."""
        return highest(start, events, self._forward_changes())

    def backward_peak(self, start: Bytes, events: Sequence[Timed]) -> dict[str, int]:
        """`start`: as in the plain run, with all that the unit keeps there."""
        level = self._with_state(start, self.put_back_bytes)
        changes = [Change(part.over_s, -part.put_back_bytes, "temporary") for part in self.parts]
        for part in self.parts:
            changes += part.saved_copies
            for storage in part.storages:
                level[storage.category] = level.get(storage.category, 0) - storage.size_bytes
                changes.append(Change(part.asked_s, storage.size_bytes, storage.category))
        spikes = {
            part.asked_s: self._with_state(part.growth, self.random_state_bytes + part.run.copied_bytes)
            for part in self.parts
        }
        return highest(level, events, changes, spikes)

    def _with_state(self, level: Bytes, size_bytes: int) -> dict[str, int]:
        return {**level, "temporary": level.get("temporary", 0) + size_bytes}

    def _forward_changes(self) -> list[Change]:
        let_go = [
            Change(storage.unsaved[1], -storage.size_bytes, storage.category)
            for part in self.parts
            for storage in part.storages
            if storage.unsaved[0] == self.forward
        ]
        return [*let_go, *(change for part in self.parts for change in part.put_back)]


@dataclass(frozen=True, slots=True)
class PartedOptions:
    """Choices of parts of one pass; the same ones of all passes of its unit.

    `lower`: each needs less memory at its unit's own highest instant, and more time, than the one before it. `sparing`:
    each sets more free from forward to backward than the one before it, and takes longer; most bytes for a second first.
    """

    lower: tuple[PartedPass, ...]
    sparing: tuple[PartedPass, ...]

    def with_modules(self, modules: tuple[Modules, ...] | None) -> PartedPass | None:
        return next((each for each in (*self.lower, *self.sparing) if each.modules == modules), None)


def highest(
    start: Bytes,
    events: Iterable[Timed],
    more: Iterable[Change],
    spikes: Mapping[float, Bytes] | None = None,
) -> dict[str, int]:
    """The highest level. Of one moment, what comes by `more` does so before its events, and what goes by it after them.
    `spikes`: by moment, what is there beside, before all of it."""
    marks: list[tuple[float, int, Timed | Bytes]] = [(event.time_s, 2, event) for event in events]
    marks += [(change.time_s, 1 if change.delta_bytes > 0 else 3, change) for change in more]
    marks += [(time_s, 0, growth) for time_s, growth in (spikes or {}).items()]
    marks.sort(key=lambda mark: mark[:2])
    level = dict(start)
    total_bytes = best_bytes = sum(level.values())
    best = dict(level)
    for _, _, change in marks:
        if isinstance(change, Mapping):
            reached = total_bytes + sum(change.values())
            if reached > best_bytes:
                best_bytes = reached
                best = {c: level.get(c, 0) + change.get(c, 0) for c in {**level, **change}}
            continue
        level[change.category] = level.get(change.category, 0) + change.delta_bytes
        total_bytes += change.delta_bytes
        if total_bytes > best_bytes:
            best_bytes, best = total_bytes, dict(level)
    return {category: size_bytes for category, size_bytes in best.items() if size_bytes}
