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
    takes: Literal["each", "buffer", "small"],
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
    units: list[str] = []
    collecting: set[str] = set()  # units that have a buffer
    changed: list[Event] = []
    waiting: list[Event] = []  # gradients born and not taken over yet
    adopted: set[int] = set()  # those that are buffers, or stay, from then on

    def buffer_of(born: Event, unit: str, time_s: float) -> int:
        """Bytes that are there from now on."""
        if takes == "each":
            return 0
        stays = takes == "small" and unit in buffers.small_bytes and is_loose(born.delta_bytes)
        if stays or (unit in buffers.adopting and unit not in collecting):
            adopted.add(born.number)
            changed.append(born.end_at(time_s))
        if stays:
            return born.delta_bytes
        is_first = unit not in collecting
        collecting.add(unit)
        sizes = buffers.size_bytes if takes == "buffer" else {**buffers.size_bytes, **buffers.small_bytes}
        return sizes.get(unit, 0) * is_first

    def take_over(time_s: float) -> None:
        for born in waiting:
            unit = gradient_unit(born, piece, placed, gradients)
            if unit is None:
                continue
            if unit not in units:
                units.append(unit)
            changed.append(Event(time_s, buffer_of(born, unit, time_s), "gradient", -1, True))
        kept = [b for b in waiting if b.category == "gradient" and b.number not in adopted]
        changed.extend(born.end_at(time_s) for born in kept)
        waiting.clear()

    for event in events:
        if event.number in adopted and event.delta_bytes < 0:
            continue  # the end of a gradient that DDP has copied
        is_gradient = gradient_unit(event, piece, placed, gradients) is not None
        is_birth = event.delta_bytes > 0 and event.number >= 0 and not is_gradient
        other_birth = is_birth and not _is_workspace(event, waiting, placed)
        own_death = event.delta_bytes < 0 and any(event.number == born.number for born in waiting)
        if other_birth or own_death:
            take_over(event.time_s)
        if event.category not in STATES or is_gradient:
            changed.append(event)
        if is_gradient:
            waiting.append(event)
    take_over(piece.end_s)
    missing_bytes = buffers.size_bytes.get(piece.unit or "", 0) if piece.unit not in units else 0
    if piece.phase == "backward" and piece.unit is not None and missing_bytes:
        units.append(piece.unit)
        size_bytes = 0 if takes == "each" else missing_bytes
        changed.insert(0, Event(piece.start_s, size_bytes, "gradient", -1, True))
    return tuple(units), changed


def _is_workspace(event: Event, waiting: Sequence[Event], placed: Sequence[Placed]) -> bool:
    """Whether the operator that makes a gradient allocates inside itself, as products of bfloat16 do on a CPU."""
    row = placed[event.number].row
    return any(is_made_within(row, placed[born.number].row.operator) for born in waiting)
