"""Parameters and gradients of a unit that lie on another tier between their uses (ZeRO-Infinity, arXiv:2104.07857).

A flat with a page has neither its shard nor its gradient in memory: a gather reads the parameters into the full flat,
what a backward leaves of the gradient is written, and an update has both in buffers for as long as it lasts. Results
hang on that in nothing: whoever reads a shard elsewhere gets a copy, read when it is asked for, and what is to stay of
what is written into it is put back. Written first, freed later: values stay in memory until the tier has them, and
for good where it does not take them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memadvisor.engines.lanes.lanes import Ticket
from memadvisor.engines.lanes.tiers import Tier

LabelTensor = Callable[[torch.Tensor], None]


@dataclass(slots=True, eq=False)
class Trouble:
    """Whether a tier takes nothing more, which is said once."""

    note: Callable[[str, str], None]
    has_failed: bool = False

    def fails(self, error: OSError) -> None:
        if not self.has_failed:
            self.has_failed = True
            self.note(
                "warning",
                f"parameters and gradients cannot be written to disk ({error.strerror or error}): they stay in memory from "
                "here on, and results are right",
            )


@dataclass(slots=True, eq=False)
class PagedTensor:
    """One dense tensor of one dimension whose values lie in a block of a tier between its uses.

    memory: the values, while the tier has not all of them. write: of them, while it is under way. what: its words in an error.
    """

    tier: Tier
    numel: int
    dtype: torch.dtype
    device: torch.device
    what: str
    trouble: Trouble
    label: LabelTensor
    memory: torch.Tensor | None = None
    is_there: bool = False  # whether it has values at all
    _block: Any = None
    write: Ticket | None = None

    def put(self, values: torch.Tensor) -> None:
        """Have the values written; they stay as they are until `settle`."""
        self.settle()
        self.is_there = True
        if self.trouble.has_failed:
            self._stay(values)
            return
        if self._block is None:
            self._block = self.tier.allocate(self.numel * self.dtype.itemsize)
        self.memory = values
        self.write = self.tier.write(self._block, values)

    def put_at_once(self, values: torch.Tensor) -> None:
        """The same, and wait for it."""
        self.put(values)
        self.settle()

    def put_parts(self, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Have values written that lie in several tensors of one dimension, each with the element it begins at, and wait
        for that."""
        self.is_there, size = True, self.dtype.itemsize
        self._block = self.tier.allocate(self.numel * size)
        places = [self.tier.part(self._block, start * size, part.nbytes) for start, part in parts]
        writes = [self.tier.write(place, part) for place, (_, part) in zip(places, parts, strict=True)]
        for write in writes:
            try:
                write.wait()
            except OSError as error:
                self.trouble.fails(error)
        if self.trouble.has_failed:
            self.memory = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            for start, part in parts:
                self.memory[start : start + part.numel()] = part
            self.label(self.memory)

    def settle(self) -> None:
        """Wait until the tier has all of it; what it does not take stays in memory of its own."""
        write, self.write = self.write, None
        if write is None or self.memory is None:
            return
        try:
            write.wait()
        except OSError as error:
            self.trouble.fails(error)
            self._stay(self.memory)
        else:
            self.memory = None

    def _stay(self, values: torch.Tensor) -> None:
        self.memory = values.clone()  # what it is in may be used for something else
        self.label(self.memory)

    def read_into(self, target: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Have the values brought into a dense tensor of as many elements, when what `after` stands for is over. Raises
        RuntimeError where it is waited for."""
        self.settle()
        if self.memory is not None:
            target.copy_(self.memory)
            return _There()
        return _Reading(self.tier.read(self._block, target, after=after), self.what)

    def read(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """A copy of the values, or of some elements of them."""
        self.settle()
        end = self.numel if end is None else end
        copy = torch.empty(end - start, dtype=self.dtype, device=self.device)
        if self.memory is not None:
            return copy.copy_(self.memory[start:end])
        self.label(copy)
        size = self.dtype.itemsize
        part = self.tier.part(self._block, start * size, (end - start) * size)
        _Reading(self.tier.read(part, copy), self.what).wait()
        return copy

    def drop(self) -> None:
        """There are no values any more; the room stays, as there will be others."""
        if self.write is not None:
            self.write.join()
        self.write = self.memory = None
        self.is_there = False

    def close(self) -> None:
        """The same, and give the room back."""
        self.drop()
        if self._block is not None:
            self.tier.free(self._block)
            self._block = None


@dataclass(slots=True, eq=False)
class Page:
    """What a flat has on a tier. gradient: of a trained one."""

    parameters: PagedTensor
    gradient: PagedTensor | None

    def tensors(self) -> list[tuple[torch.Tensor, str]]:
        """What of it is in memory now, with its category."""
        both = ((self.parameters, "parameter"), (self.gradient, "gradient"))
        return [
            (paged.memory, what) for paged, what in both if paged is not None and paged.memory is not None
        ]

    def close(self) -> None:
        for paged in (self.parameters, self.gradient):
            if paged is not None:
                paged.close()


@dataclass(slots=True, eq=False)
class Leaving:
    """A gradient that is being put away: the ticket of a reduction to shards."""

    gradient: PagedTensor
    values: torch.Tensor = field(repr=False)

    def wait(self) -> torch.Tensor:
        self.gradient.settle()
        return self.values


def put_gradient(gradient: PagedTensor, values: torch.Tensor) -> Leaving:
    """Begin to put away a backward's gradient, added to that of the backwards before it where there is one."""
    if gradient.is_there:
        values.add_(gradient.read())
    gradient.put(values)
    return Leaving(gradient, values)


class _There:
    """A ticket of what is over."""

    def wait(self) -> None: ...

    def join(self) -> None: ...


class _Reading:
    """A read, whose failure says what it was."""

    def __init__(self, ticket: Ticket, what: str) -> None:
        self._ticket = ticket
        self._what = what

    def wait(self) -> None:
        try:
            self._ticket.wait()
        except OSError as error:
            raise RuntimeError(
                f"{self._what} cannot be read back from disk: {error.strerror or error}. Training cannot go on rightly "
                "from here; start again from a checkpoint."
            ) from error

    def join(self) -> None:
        self._ticket.join()
