"""What a simulation says of memory: the highest instants of a step's parts, one after another.

A search plays hundreds of steps of hundreds of parts and asks of most for their sums alone. So these are kept as a few
lists of numbers, and what is alive is told apart by category when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memadvisor.cost.activations import Activations, View, added
from memadvisor.cost.places import second_run_of
from memadvisor.cost.step import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes alive at the highest instant of a part of the step, by category and in all."""

    position: str  # "backward of blocks.3"
    segment: int  # of the captured step
    by_category_bytes: Bytes
    total_bytes: int
    view: View


class Moments:
    """In the order of the step."""

    def __init__(self, activations: Activations) -> None:
        self.activations = activations
        self._positions: list[str] = []
        self._begins: list[int] = []  # the segments at whose start the level was, or in which it is reached
        self._views: list[View] = []
        self._beside: list[
            Bytes | None
        ] = []  # what is there beside a segment's start; None: the segment's own peak
        self._states: list[Bytes] = []
        self._last: Bytes = {}  # of these
        self._last_bytes = 0
        self._second_runs: set[int] = set()  # which of the moments are those
        self.segments: list[int] = []
        self.totals_bytes: list[int] = []

    def add_peak(self, position: str, segment: int, view: View, states: Bytes) -> None:
        """A segment's own highest instant, and the states that are there."""
        size_bytes = self.activations.peak_bytes(segment, view)
        self._add(position, segment, segment, view, None, states, size_bytes)

    def add(self, position: str, segment: int, begins: int, view: View, beside: Bytes, states: Bytes) -> None:
        """In `segment`, what there is when the segment `begins` starts, with `beside` and the states."""
        size_bytes = self.activations.start_bytes(begins, view) + sum(beside.values())
        self._add(position, segment, begins, view, beside, states, size_bytes)

    def add_second_runs(self, segment: int, view: View, states: Bytes) -> None:
        """What runs again before a backward."""
        for stretch, growth in self.activations.recomputations(segment):
            self._second_runs.add(len(self))
            reached = self.activations.beside_again(segment, view, growth)
            self.add(second_run_of(stretch), segment, segment, view, reached, states)

    def under(self, activations: Activations) -> Moments:
        """The moments of the same step under other activations: what the engine holds, and how a segment is seen, is the
        same whatever runs again, or waits elsewhere."""
        found = Moments(activations)
        for place, segment in enumerate(self.segments):
            if place in self._second_runs:
                continue
            position, view, states = self._positions[place], self._views[place], self._states[place]
            beside = self._beside[place]
            if beside is not None:
                found.add(position, segment, self._begins[place], view, beside, states)
                continue
            if activations.runs_again(segment):
                found.add_second_runs(segment, view, states)
            found.add_peak(position, segment, view, states)
        return found

    def _add(
        self,
        position: str,
        segment: int,
        begins: int,
        view: View,
        beside: Bytes | None,
        states: Bytes,
        size_bytes: int,
    ) -> None:
        if states is not self._last:
            if states != self._last:  # else it is kept once
                self._last = states
            self._last_bytes = sum(states.values())
        self._positions.append(position)
        self.segments.append(segment)
        self._begins.append(begins)
        self._views.append(view)
        self._beside.append(beside)
        self._states.append(self._last)
        self.totals_bytes.append(size_bytes + self._last_bytes)

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, place: int) -> Moment:
        beside, begins, view = self._beside[place], self._begins[place], self._views[place]
        if beside is None:
            activations = self.activations.peak(begins, view)
        else:
            activations = added(self.activations.start(begins, view), beside)
        return Moment(
            position=self._positions[place],
            segment=self.segments[place],
            by_category_bytes=added(activations, self._states[place]),
            total_bytes=self.totals_bytes[place],
            view=view,
        )

    def __iter__(self) -> Iterator[Moment]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows

    def totals(self) -> Iterator[tuple[int, int]]:
        """By moment, its segment and all of its bytes."""
        return zip(self.segments, self.totals_bytes, strict=True)

    @property
    def peak_bytes(self) -> int:
        return max(self.totals_bytes)

    @property
    def peak(self) -> Moment:
        """The highest, the first one of several."""
        return self[self.totals_bytes.index(self.peak_bytes)]
