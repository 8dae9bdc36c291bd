"""Parameters and gradients of units that lie on another tier, in memory for as long as their update lasts.

As with the optimizer's state (paged_step.py) two pairs of buffers take turns: while one unit is updated in the first,
the parameters of the unit before are written from the second, and then those of the next unit, and its gradient, are
read into it. A gradient that the update leaves as it is need not be written again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from memadvisor.engines.lanes.lanes import EndedWell, Ticket
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.paged_flats import PagedTensor
from memadvisor.engines.sharding.unit_step import LabelAs

_ALIGNMENT_BYTES = 64  # of a flat in a buffer, as the allocator aligns it

Places = list[tuple[Flat, int, int]]  # a flat's bytes in a buffer: from, to


class UpdateBuffers:
    """Those of one step. flats: of each unit that has any, the trained ones; sides: which buffers it has."""

    def __init__(self, flats: Mapping[str, Sequence[Flat]], sides: Mapping[str, int], label: LabelAs) -> None:
        self._places = {unit: _laid_out(own) for unit, own in flats.items() if own}
        self._sides = sides
        self._label = label
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}
        self._reading: dict[str, list[Ticket]] = {}
        self._versions: dict[str, list[int]] = {}
        self._writing: dict[int, str] = {}  # the unit whose parameters are written from a side's buffer
        self.moved_bytes = 0
        self.waited_s = 0.0

    def make_buffers(self) -> None:
        """For the whole step, so that what is in memory does not hang on how fast the tier is."""
        for side in {self._sides[unit] for unit in self._places}:
            units = [unit for unit in self._places if self._sides[unit] == side]
            size_bytes = max(self._places[unit][-1][2] for unit in units)
            device = self._places[units[0]][0][0].device
            for what in ("parameter", "gradient"):
                buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
                self._label(buffer, what, "")
                self._buffers[side, what] = buffer

    def prefetch(self, unit: str) -> None:
        """Begin to read a unit's parameters and gradient."""
        if unit not in self._places or unit in self._reading:
            return
        before = self._writing.get(self._sides[unit])
        writes = (
            [w for flat, _, _ in self._places[before] for w in _writes_of(flat)] if before is not None else []
        )
        if any(paged.memory is not None for _, paged, _ in self._wanted(unit)):
            self._settle(self._sides[unit])  # copied here and now, to where the unit before is written from
            writes = []
        # Where the unit before could not be written, it is in the buffer alone, and stays there.
        after = [EndedWell(ticket) for ticket in writes]
        self._reading[unit] = [paged.read_into(target, after) for _, paged, target in self._wanted(unit)]
        self.moved_bytes += sum(target.nbytes for _, _, target in self._wanted(unit))

    def bring(self, unit: str) -> None:
        """Have a unit's parameters and gradient in its flats."""
        if unit not in self._places:
            return
        self.prefetch(unit)
        start_s = time.perf_counter()
        for ticket, (_, paged, target) in zip(self._reading.pop(unit), self._wanted(unit), strict=True):
            try:
                ticket.wait()
            except RuntimeError:
                self._settle(
                    self._sides[unit]
                )  # perhaps it has not begun, as what was there could not be written
                paged.read_into(target).wait()
        self.waited_s += time.perf_counter() - start_s
        for flat, start, end in self._places[unit]:
            flat.own_shard = self._view(unit, "parameter", flat, start, end)
            if flat.paged_gradient is not None:
                flat.own_gradient = self._view(unit, "gradient", flat, start, end)
        self._versions[unit] = self._gradient_versions(unit)

    def put_away(self, unit: str) -> None:
        """Begin to write a unit's parameters, and wait until those of the unit before are written."""
        if unit not in self._places:
            return
        side, is_same = self._sides[unit], self._versions.pop(unit) == self._gradient_versions(unit)
        for flat, start, end in self._places[unit]:
            if flat.page is not None and flat.own_shard is not None:
                flat.page.parameters.put(flat.own_shard)
                self.moved_bytes += end - start
                if not is_same and (gradient := flat.paged_gradient) is not None:
                    gradient.put(self._view(unit, "gradient", flat, start, end))
            flat.own_shard = flat.own_gradient = None
        # Units without flats come between: of the other side none may have been put away since, and what nobody settles
        # keeps the buffer until the unit is read again. Its write is over, as this unit was read behind it.
        self._settle(side)
        self._writing[side] = unit
        self._settle(1 - side)

    def finish(self) -> None:
        """Wait until all is written, and let go of the buffers."""
        for unit, tickets in self._reading.items():
            for ticket in tickets:
                ticket.join()  # else it would write into memory that is given away
            self._versions.pop(unit, None)
        for unit in list(self._versions):  # an update that an exception has ended: what it has written counts
            self.put_away(unit)
        for side in list(self._writing):
            self._settle(side)
        self._reading.clear()
        self._buffers.clear()

    def _settle(self, side: int) -> None:
        start_s, unit = time.perf_counter(), self._writing.pop(side, None)
        for flat, _, _ in self._places[unit] if unit is not None else ():
            if flat.page is not None:
                flat.page.parameters.settle()
                if flat.page.gradient is not None:
                    flat.page.gradient.settle()
        self.waited_s += time.perf_counter() - start_s

    def _wanted(self, unit: str) -> list[tuple[Flat, PagedTensor, torch.Tensor]]:
        """What is read for a unit's update, and where to."""
        wanted = []
        for flat, start, end in self._places[unit]:
            if flat.page is not None:
                there = self._view(unit, "parameter", flat, start, end)
                wanted.append((flat, flat.page.parameters, there))
            if (gradient := flat.paged_gradient) is not None:
                wanted.append((flat, gradient, self._view(unit, "gradient", flat, start, end)))
        return wanted

    def _view(self, unit: str, what: str, flat: Flat, start: int, end: int) -> torch.Tensor:
        return self._buffers[self._sides[unit], what][start:end].view(flat.dtype)

    def _gradient_versions(self, unit: str) -> list[int]:
        gradients = (flat.own_gradient for flat, _, _ in self._places[unit])
        return [gradient._version for gradient in gradients if gradient is not None]


def _writes_of(flat: Flat) -> list[Ticket]:
    """Those under way, from the buffers."""
    both = () if flat.page is None else (flat.page.parameters, flat.page.gradient)
    return [paged.write for paged in both if paged is not None and paged.write is not None]


def _laid_out(flats: Sequence[Flat]) -> Places:
    places: Places = []
    start = 0
    for flat in flats:
        end = start + flat.padded_numel * flat.dtype.itemsize
        places.append((flat, start, end))
        start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places
