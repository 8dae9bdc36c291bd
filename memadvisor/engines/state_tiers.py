"""Where optimizer state lies while its unit is not updated: a file, or the pinned memory of a GPU's host.

What is fetched goes into buffers on the device that updates; a tier knows how bytes come there and go back. On a CPU
a buffer is written to the file, and read from it, as it is. For a GPU the host tier copies on a stream of its own
between the device and pinned memory that stays; the disk tier has a pinned copy of each transfer between the two.
The GPU's ones have not been run on a GPU.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from memadvisor.engines.cuda_lane import CudaLane
from memadvisor.engines.disk import Block, DiskFile
from memadvisor.engines.lanes import Lane, Ticket
from memadvisor.schedule import Lane as Transfers


class Tier(Protocol):
    """Blocks of bytes outside the memory that updates. Transfers are of dense tensors; `wait` raises OSError.

    A read begins when all tickets of `after` have ended well, and fails where one of them has not.
    """

    def allocate(self, size_bytes: int) -> Any: ...
    def free(self, block: Any) -> None: ...
    def part(self, block: Any, start: int, size_bytes: int) -> Any: ...
    def write(self, block: Any, source: torch.Tensor) -> Ticket: ...
    def read(self, block: Any, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket: ...


def make_tier(lane: Transfers, device: torch.device) -> Tier:
    """The tier of parameters on `device`. Raises UsageError where no file can be made."""
    if lane is Transfers.HOST:
        return HostTier(device)
    return DiskTier() if device.type == "cpu" else StagedDiskTier(device)


class DiskTier:
    """A file without a name in the directory for temporary files (TMPDIR)."""

    def __init__(self) -> None:
        self._file = DiskFile(Path(tempfile.gettempdir()))
        self._freed: deque[Block] = deque()

    def allocate(self, size_bytes: int) -> Block:
        while self._freed:
            self._file.free(self._freed.popleft())
        return self._file.allocate(size_bytes)

    def free(self, block: Block) -> None:
        self._freed.append(block)  # the garbage collector calls this, wherever it happens to run

    def part(self, block: Block, start: int, size_bytes: int) -> Block:
        return Block(block.offset + start, size_bytes)

    def write(self, block: Block, source: torch.Tensor) -> Ticket:
        return self._file.write(block, source)

    def read(self, block: Block, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        return self._file.read(block, target, after=[_EndedWell(ticket) for ticket in after])


class _EndedWell:
    """A ticket that whoever follows it must see succeed: what it was to have written may be there alone."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def wait(self) -> Any:
        return self._ticket.wait()

    join = wait


class HostTier:
    """Pinned memory of the host; where it cannot be pinned, ordinary memory, and slower schedule."""

    def __init__(self, device: torch.device) -> None:
        self._lane: Lane = CudaLane(device)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return pinned(size_bytes)

    def free(self, block: torch.Tensor) -> None:
        """Nothing: it goes with its last reference."""

    def part(self, block: torch.Tensor, start: int, size_bytes: int) -> torch.Tensor:
        return block[start : start + size_bytes]

    def write(self, block: torch.Tensor, source: torch.Tensor) -> Ticket:
        return self._lane.submit(
            lambda: block[: source.nbytes].copy_(source.view(torch.uint8), non_blocking=True), reads=[source]
        )

    def read(self, block: torch.Tensor, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        # The lane does its work in order, so writes that were submitted before are over.
        return self._lane.submit(
            lambda: target.view(torch.uint8).copy_(block[: target.nbytes], non_blocking=True), writes=[target]
        )


class StagedDiskTier(DiskTier):
    """The same file for a GPU. The device's copy of what is read is made where it is waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._lane: Lane = CudaLane(device)

    def write(self, block: Block, source: torch.Tensor) -> Ticket:
        staged = pinned(source.nbytes)
        copied = self._lane.submit(
            lambda: staged.copy_(source.view(torch.uint8), non_blocking=True), reads=[source]
        )
        return _Staged(self._file.write(block, staged, after=[copied]), copied)

    def read(self, block: Block, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        staged = pinned(target.nbytes)
        return _Arriving(super().read(block, staged, after=after), staged, target)


class _Staged:
    """A write whose device copy is over before it."""

    def __init__(self, written: Ticket, copied: Ticket) -> None:
        self._written = written
        self._copied = copied

    def wait(self) -> Any:
        self._copied.wait()
        return self._written.wait()

    def join(self) -> None:
        self._written.join()


class _Arriving:
    """A read that is in host memory when it is over, and on the device when it has been waited for."""

    def __init__(self, read: Ticket, staged: torch.Tensor, target: torch.Tensor) -> None:
        self._read = read
        self._staged: torch.Tensor | None = staged
        self._target: torch.Tensor | None = target

    def wait(self) -> None:
        self._read.wait()
        if self._staged is not None and self._target is not None:
            self._target.view(torch.uint8).copy_(self._staged)
        self._staged = self._target = None

    def join(self) -> None:
        self._read.join()


def pinned(size_bytes: int) -> torch.Tensor:
    """Host memory that a GPU copies from by itself, if the host can pin so much."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return torch.empty(size_bytes, dtype=torch.uint8)
