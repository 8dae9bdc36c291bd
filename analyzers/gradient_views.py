"""What becomes of the gradients that are born in a segment, by who takes them over: the views of a segment (cost/step.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from memadvisor.analyzers.born_gradients import Gradients, gradient_unit
from memadvisor.analyzers.gradient_buffers import Buffers
from memadvisor.analyzers.inner_workspaces import is_made_within
from memadvisor.analyzers.placement import Placed, Stretch
from memadvisor.cost.step import STATES
from memadvisor.loose import is_loose

# Who takes gradients over: one who has them nowhere, a buffer, or a buffer the small ones.
Takes = Literal["each", "buffer", "small"]


class Event(NamedTuple):
    """A TimedChange of live bytes. Deaths come before births of the same time."""

    time_s: float
    delta_bytes: int
    category: str
    number: int  # of the placed storage; -1 for the unexplained rest
    is_own: bool  # the storage was born in this segment

    def end_at(self, time_s: float) -> Event:
        """The end of what it brings into being."""
        return Event(time_s, -self.delta_bytes, self.category, self.number, self.is_own)


def own_gradients(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if e.category not in STATES or (e.category == "gradient" and e.is_own)]


def handed_over(
    piece: Stretch,
    events: Sequence[Event],
    *,
    placed: Sequence[Placed],
    gradients: Gradients,
    buffers: Buffers,
    takes: Takes,
) -> tuple[tuple[str, ...], list[Event]]:
    """Events without states, and with each gradient taken over when the operator that made it is done.

    It is done, and has dropped what it had saved, before anything else is born. Who takes over each has it nowhere. To
    collect in a buffer, a unit's is made when its first gradient is taken over; the gradient of a unit that adopts becomes
    its buffer; a unit whose gradients cannot be told from other temporaries is taken to have its buffer
    from the start. Where the small ones are collected, large ones stay. Returns the units whose gradients came too.
    """
    # Where no gradients come; autograd hands over those of a unit that is called again when all calls' are summed.
    if piece.phase != "backward" or piece.unit is None or piece.call:
        return (), [event for event in events if event.category not in STATES]
    changed: list[Event] = []
    waiting: list[tuple[Event, str]] = []  # gradients born and not taken over yet, and whose they are
    taker = _Taker(changed, buffers, takes)
    for event in events:
        if event.number in taker.kept and event.delta_bytes < 0:
            continue  # the end of a gradient that DDP has copied
        unit = gradient_unit(event, piece, placed, gradients)
        is_birth = event.delta_bytes > 0 and event.number >= 0 and unit is None
        other_birth = is_birth and not _is_workspace(event, waiting, placed)
        own_death = event.delta_bytes < 0 and any(event.number == born.number for born, _ in waiting)
        if other_birth or own_death:
            taker.take_over(waiting, event.time_s)
        if event.category not in STATES or unit is not None:
            changed.append(event)
        if unit is not None:
            waiting.append((event, unit))
    taker.take_over(waiting, piece.end_s)
    missing_bytes = buffers.size_bytes.get(piece.unit, 0)
    if missing_bytes and piece.unit not in taker.units:
        taker.units.append(piece.unit)
        size_bytes = 0 if takes == "each" else missing_bytes
        changed.insert(0, Event(piece.start_s, size_bytes, "gradient", -1, True))
    return tuple(taker.units), changed


class _Taker:
    """Who takes over gradients, and writes what becomes of them into `changed`. units: those whose have come. kept: the
    gradients that are buffers, or stay, from then on."""

    def __init__(self, changed: list[Event], buffers: Buffers, takes: Takes) -> None:
        self._changed = changed
        self._buffers = buffers
        self._takes = takes
        self._collecting: set[str] = set()  # units that have a buffer
        self.units: list[str] = []
        self.kept: set[int] = set()

    def take_over(self, waiting: list[tuple[Event, str]], time_s: float) -> None:
        for born, unit in waiting:
            if unit not in self.units:
                self.units.append(unit)
            self._changed.append(Event(time_s, self._held_bytes(born, unit, time_s), "gradient", -1, True))
        gone = (born for born, _ in waiting if born.category == "gradient" and born.number not in self.kept)
        self._changed.extend(born.end_at(time_s) for born in gone)
        waiting.clear()

    def _held_bytes(self, born: Event, unit: str, time_s: float) -> int:
        """What is there of it, or of the buffer that it is the first of, from now on."""
        buffers = self._buffers
        if self._takes == "each":
            return 0
        are_small = self._takes == "small" and unit in buffers.small_bytes
        stays = are_small and is_loose(born.delta_bytes)
        is_first = unit not in self._collecting
        if stays or (unit in buffers.adopting and is_first):
            self.kept.add(born.number)
            self._changed.append(born.end_at(time_s))
        if stays:
            return born.delta_bytes
        self._collecting.add(unit)
        sizes = buffers.small_bytes if are_small else buffers.size_bytes
        return sizes.get(unit, 0) * is_first


def _is_workspace(event: Event, waiting: Sequence[tuple[Event, str]], placed: Sequence[Placed]) -> bool:
    """Whether the operator that makes a gradient allocates inside itself, as products of bfloat16 do on a CPU."""
    row = placed[event.number].row
    return any(is_made_within(row, placed[born.number].row.operator) for born, _ in waiting)
