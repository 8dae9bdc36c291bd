"""Blocks of bytes on disk, that tensors are written to and read from beside the compute.

    disk = DiskFile(directory)
    block = disk.allocate(tensor.nbytes)
    written = disk.write(block, tensor)            # a Ticket; the tensor stays as it is until it is over
    ...
    written.wait()                                 # raises OSError: the disk is full, or broken; the tensor is whole
    read = disk.read(block, target, after=[written])
    read.wait()                                    # the target holds the bytes; raises OSError
    disk.free(block)                               # room for another

Two lanes (`writes`, `reads`), each one thread that does its transfers in the order of submission: while one block is
written another is read, and the thread that computes waits for tickets alone. Tensors go to the file, and come from
it, without a copy between: who wants a buffer for the next transfer while one is used keeps two tensors.
A transfer that fails raises in its own `wait`, and those behind it go on. The caller sees to it that a read comes
after the write of what it reads (`after`), and that nobody changes a tensor that is being written.

The file has no name from its first moment on (on file systems that cannot do so, from its second), so no end of the
process leaves it behind, and nobody but its owner may read it. It grows to the most that was in use at one time, and
is reused from there. What was written lately is in the kernel's page cache too, which gives way when memory is short.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path

import torch

from memadvisor.engines.lanes.lanes import Lane, Ticket
from memadvisor.engines.lanes.thread_lane import ThreadLane
from memadvisor.engines.lanes.transfers import timed
from memadvisor.errors import UsageError

ALIGNMENT_BYTES = 4096  # of blocks: a page, so that no two of them share one


@dataclass(frozen=True, slots=True, order=True)
class Block:
    """A place in the file; `size_bytes` is a multiple of ALIGNMENT_BYTES."""

    offset: int
    size_bytes: int


class DiskFile:
    """A file in `directory`, until `close` or until nobody has this object. Raises UsageError where none can be made.

    After a fork it is the parent's alone: the child makes its own with the first block it asks for, and its
    parent's blocks are lost to it.
    """

    def __init__(self, directory: Path, *, writes: Lane | None = None, reads: Lane | None = None) -> None:
        self.directory = directory
        self.writes: Lane = writes or ThreadLane(survives=True)
        self.reads: Lane = reads or ThreadLane(survives=True)
        self._open()

    def _open(self) -> None:
        try:
            with tempfile.TemporaryFile(prefix="memadvisor-", dir=self.directory, buffering=0) as file:
                self._file = _File(os.dup(file.fileno()), "rb+")
        except OSError as error:
            raise UsageError(
                f"No file can be made in {str(self.directory)!r}: {error.strerror}.",
                hint="name a directory on a disk with room, that you may write to.",
            ) from error
        self._pid = os.getpid()
        self._free: list[Block] = []  # by offset, no two of them adjacent
        self._given_back: deque[Block] = deque()
        self.size_bytes = 0  # of the file, as far as blocks were given out

    def allocate(self, size_bytes: int) -> Block:
        """Room for so many bytes: the smallest free stretch that holds them, else more of the file."""
        if self._pid != os.getpid():
            self._open()
        self._take_back()
        size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if size_bytes == 0:
            return Block(0, 0)
        fitting = [free for free in self._free if free.size_bytes >= size_bytes]
        if not fitting:
            block = Block(self.size_bytes, size_bytes)
            self.size_bytes += size_bytes
            return block
        found = min(fitting, key=lambda free: (free.size_bytes, free.offset))
        self._free.remove(found)
        if found.size_bytes > size_bytes:
            bisect.insort(self._free, Block(found.offset + size_bytes, found.size_bytes - size_bytes))
        return Block(found.offset, size_bytes)

    def free(self, block: Block) -> None:
        """Give a block back, from any thread, also in a finalizer.

        A write of it that is under way ends before that of whoever gets the room next.
        """
        if (
            block.size_bytes and self._pid == os.getpid()
        ):  # else there is no room, or it is in the parent's file
            self._given_back.append(block)

    @property
    def used_bytes(self) -> int:
        """By blocks that have not been given back."""
        self._take_back()
        return self.size_bytes - sum(free.size_bytes for free in self._free)

    def _take_back(self) -> None:
        while self._given_back:
            self._add_free(self._given_back.popleft())

    def _add_free(self, block: Block) -> None:
        place = bisect.bisect(self._free, block)
        first, end = block.offset, block.offset + block.size_bytes
        if place < len(self._free) and self._free[place].offset == end:
            end += self._free.pop(place).size_bytes
        if place and (before := self._free[place - 1]).offset + before.size_bytes == first:
            first = self._free.pop(place - 1).offset
            place -= 1
        self._free.insert(place, Block(first, end - first))

    def write(self, block: Block, source: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        """Have the bytes of a dense CPU tensor written to the block."""
        view = _bytes_of(source, block)
        work = partial(_write, self._file, view, block.offset)
        return self.writes.submit(timed("disk", "write", view.nbytes, work), after=after, reads=[source])

    def read(self, block: Block, target: torch.Tensor, *, after: Sequence[Ticket] = ()) -> Ticket:
        """Have a dense CPU tensor filled with the block's first bytes."""
        view = _bytes_of(target, block)
        work = partial(_read, self._file, view, block.offset)
        return self.reads.submit(timed("disk", "read", view.nbytes, work), after=after, writes=[target])

    def close(self) -> None:
        """Let go of the file when what was submitted is over. No block may be used after it."""
        if self._pid == os.getpid():
            self.writes.run(lambda: None)
            self.reads.run(lambda: None)
            self.writes.close()
            self.reads.close()
        self._file.close()


class _File(FileIO):
    """Lives as long as its DiskFile, and as the work that holds it; whoever is the last closes it.

    Python warns of files that end so, where it is asked to (-X dev, PYTHONWARNINGS), and the script would be told of ours.
    """

    def __del__(self) -> None:
        self.close()


def _bytes_of(tensor: torch.Tensor, block: Block) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes > block.size_bytes:
        raise AssertionError("a block is for a dense tensor in RAM, and no more bytes than it was asked for")
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


# Work holds the file itself: the number of one that has been closed may be another's.
def _write(file: FileIO, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(file.fileno(), view, offset)  # less than asked for where the disk is nearly full
        view, offset = view[done:], offset + done


def _read(file: FileIO, view: memoryview, offset: int) -> None:
    while view:
        done = os.preadv(file.fileno(), [view], offset)
        if done == 0:
            raise OSError("the file is shorter than what was written to it")
        view, offset = view[done:], offset + done
