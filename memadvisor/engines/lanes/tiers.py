"""Where bytes lie that the device has no room for: the pinned memory of a GPU's host, or a file.

    block = tier.allocate(source.nbytes)
    written = tier.write(block, source)               # begins; `source` stays as it is until it has been waited for
    read = tier.read(block, target, after=[written])  # begins when `written` is over
    tier.free(block)

On a CPU a tensor is written to the file, and read from it, as it is. For a GPU the host tier copies between the device
and pinned memory that stays, on a stream for each direction; the disk tier has a pinned copy of each transfer between
the two. The GPU's ones have not been run on a GPU. Codes in the device's own memory are a tier too (coded_tier.py).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from memadvisor.engines.lanes.coded_tier import CodedTier
from memadvisor.engines.lanes.disk import Block, DiskFile
from memadvisor.engines.lanes.lane_for import lane_for
from memadvisor.engines.lanes.lanes import Lane, Ticket
from memadvisor.schedule import Lane as Transfers


class Tier(Protocol):
    """Blocks of bytes outside of the device's memory. Transfers are of dense 1-D tensors; `wait` raises OSError.

    `free` may be called from any thread, also in a finalizer. `part`: bytes of a block, to be written and read alone.
    """

    def allocate(self, size_bytes: int) -> Any: ...
    def free(self, block: Any) -> None: ...
    def part(self, block: Any, start: int, size_bytes: int) -> Any: ...
    def write(self, block: Any, source: torch.Tensor) -> Ticket: ...
    def read(self, block: Any, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket: ...


def make_tier(
    lane: Transfers, device: torch.device, directory: Path, note: Callable[[str, str], None]
) -> Tier:
    """The tier that a lane reaches from `device`. Raises UsageError where no file can be made in `directory`."""
    if lane is Transfers.COMPUTE:
        return CodedTier(device)
    if device.type == "cpu":
        return DiskTier(DiskFile(directory))
    host = HostTier(lane_for(device), lane_for(device), PinnedMemory(note))
    return host if lane is Transfers.HOST else StagedDiskTier(DiskFile(directory), host)


class PinnedMemory:
    """Buffers of the host that a GPU copies from and to by itself; each is used again for as many bytes.

    A step asks for the same sizes as the one before it, so no buffer is made after the first one.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._pins = torch.cuda.is_available()
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, size_bytes: int) -> torch.Tensor:
        free = self._free[size_bytes]
        return free.pop() if free else self._new(size_bytes)

    def give(self, buffer: torch.Tensor) -> None:
        self._free[buffer.nbytes].append(buffer)

    def _new(self, size_bytes: int) -> torch.Tensor:
        if self._pins:
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                reason = str(error).splitlines()[0]
                self._note(
                    "warning", f"the host cannot pin memory, so transfers hold up the training: {reason}"
                )
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


class HostTier:
    """Blocks are buffers of `memory`; one lane writes them, one reads them."""

    def __init__(self, writes: Lane, reads: Lane, memory: PinnedMemory) -> None:
        self._writes, self._reads = writes, reads
        self.memory = memory

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return self.memory.take(size_bytes)

    def free(self, block: torch.Tensor) -> None:
        # Whoever gets it next writes it on the lane that wrote it, behind that.
        self.memory.give(block)

    def part(self, block: torch.Tensor, start: int, size_bytes: int) -> torch.Tensor:
        return block[start : start + size_bytes]

    def write(self, block: torch.Tensor, source: torch.Tensor) -> Ticket:
        there, data = block[: source.nbytes], source.view(torch.uint8)
        return self._writes.submit(
            lambda: there.copy_(data, non_blocking=True), reads=[source], writes=[block]
        )

    def read(self, block: torch.Tensor, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        there, data = block[: target.nbytes], target.view(torch.uint8)
        return self._reads.submit(
            lambda: data.copy_(there, non_blocking=True), after=after, reads=[block], writes=[target]
        )


class DiskTier:
    """Blocks of an unlinked file, for a device whose memory is the host's."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file

    def allocate(self, size_bytes: int) -> Block:
        return self._file.allocate(size_bytes)

    def free(self, block: Block) -> None:
        self._file.free(block)

    def part(self, block: Block, start: int, size_bytes: int) -> Block:
        return Block(block.offset + start, size_bytes)

    def write(self, block: Block, source: torch.Tensor) -> Ticket:
        return self._file.write(block, source)

    def read(self, block: Block, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        return self._file.read(block, target, after=after)


class StagedDiskTier(DiskTier):
    """The same for a GPU, through buffers of its host.

    Who waits for a write stands still until it is on disk; the device's copy of what is read is made where it is waited
    for, since the device's lane, or who queues it there, would else wait for the disk.
    """

    def __init__(self, file: DiskFile, host: HostTier) -> None:
        super().__init__(file)
        self._host = host

    def write(self, block: Block, source: torch.Tensor) -> Ticket:
        buffer = self._host.memory.take(source.nbytes)
        copied = self._host.write(buffer, source)
        return _Leaving(self._file.write(block, buffer, after=[copied]), copied, self._host, buffer)

    def read(self, block: Block, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        buffer = self._host.memory.take(target.nbytes)
        return _Arriving(self._file.read(block, buffer, after=after), self._host, buffer, target)


class _Leaving:
    """A write by way of a buffer, which is free when the write has been waited for."""

    def __init__(self, written: Ticket, copied: Ticket, host: HostTier, buffer: torch.Tensor) -> None:
        self._written = written
        self._copied = copied
        self._host = host
        self._buffer: torch.Tensor | None = buffer
        self._lock = threading.Lock()  # a read that follows it waits for it in a thread of its own

    def wait(self) -> Any:
        self._copied.wait()
        self._written.wait()
        with self._lock:
            buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._host.free(buffer)

    def join(self) -> None:
        self._written.join()


class _Arriving:
    """A read that is in the buffer when it is over, and on the device when it has been waited for."""

    def __init__(self, read: Ticket, host: HostTier, buffer: torch.Tensor, target: torch.Tensor) -> None:
        self._read = read
        self._host = host
        self._buffer: torch.Tensor | None = buffer
        self._target = target

    def wait(self) -> Any:
        self._read.wait()
        if self._buffer is not None:
            copied = self._host.read(self._buffer, self._target)
            copied.wait()
            copied.join()  # else what is read from disk next could overwrite what is not copied yet
            self._host.free(self._buffer)
            self._buffer = None

    def join(self) -> None:
        self._read.join()
