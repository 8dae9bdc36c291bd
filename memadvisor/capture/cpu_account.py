"""The CPU allocator's own account: its total, and whether a block is its own.

torch's CPU allocator keeps an account only while a profiler records memory, or while the flag behind
`caffe2_report_cpu_memory_usage` is set. The flag and the account are exported by libc10: we set the
flag, find the total in the account by making it change, and check that it does. Where any of this is
not as expected, there is no account, and what depends on it is "not recorded". With it, the profiler's
memory events carry the exact total, also of what was allocated before the profiler ran.

Other threads allocate meanwhile: Python's own are kept waiting (a PyDLL holds the interpreter's lock), and one that is
inside an operator shows in a total that does not come back to what it was.

With the flag set the allocator words a log line for every block, printed or not: 40 % of a step of many tiny
operators. So the account is closed as soon as the traced step has been written.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_FLAG, _LOG_LEVEL = "FLAGS_caffe2_report_cpu_memory_usage", "FLAGS_caffe2_log_level"
# c10::profiledCPUMemoryReporter(), and New(void*, size_t) and Delete(void*) of what it returns.
_REPORTER = "_ZN3c1025profiledCPUMemoryReporterEv"
_NEW = "_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm"
_DELETE = "_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv"
_NUM_WORDS = 14  # a mutex, a hash table, the total and a counter: 112 bytes with libstdc++
_PROBE_BYTES = 4_242_421
_ERRORS_ONLY = 2
_NUM_PROBES = 20  # until no other thread allocates during one


class CpuAccount:
    """An open account; see `open_cpu_account`."""

    def __init__(self, library: ctypes.PyDLL, flag: ctypes.c_bool, *, was_open: bool) -> None:
        self._flag, self._was_open = flag, was_open
        reporter_of = getattr(library, _REPORTER)
        reporter_of.restype = ctypes.c_void_p
        self._new, self._delete = getattr(library, _NEW), getattr(library, _DELETE)
        self._new.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._delete.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._new.restype = self._delete.restype = None
        self._log_level = ctypes.c_int.in_dll(library, _LOG_LEVEL)
        self._reporter: int = reporter_of()
        self._words: Any = (ctypes.c_int64 * _NUM_WORDS).from_address(self._reporter)
        self._total = self._find_total()

    def allocated_bytes(self) -> int:
        """Bytes that the allocator has handed out and not got back."""
        return int(self._words[self._total])

    def add(self, address: int, size_bytes: int) -> None:
        self._new(self._reporter, address, size_bytes)

    def holds(self, address: int, size_bytes: int) -> bool:
        """Whether a live block of this size at `address` is the allocator's, and not numpy's, or shared memory. By how much
        the total changes without it: other threads may allocate a little meanwhile.

        Not while a profiler records: it would see the block go and come.
        """
        level, self._log_level.value = self._log_level.value, _ERRORS_ONLY
        try:
            before_bytes = self.allocated_bytes()
            self._delete(self._reporter, address)
            is_held = 2 * (before_bytes - self.allocated_bytes()) > size_bytes
            if is_held:
                self.add(address, size_bytes)
            return is_held
        finally:
            self._log_level.value = level

    def close(self, alive: Iterable[int]) -> None:
        """Leave the allocator as it was found. `alive` are addresses of blocks: what an account keeps that is no
        longer told of their end would mislead a profiler that the script starts later."""
        if self._was_open:
            return
        level, self._log_level.value = self._log_level.value, _ERRORS_ONLY
        try:
            for address in alive:
                self._delete(self._reporter, address)
        finally:
            self._log_level.value = level
            self._flag.value = False

    def _find_total(self) -> int:
        probe = ctypes.create_string_buffer(1)  # an address that is nobody's block
        address = ctypes.addressof(probe)
        for _ in range(_NUM_PROBES):
            before = list(self._words)
            self._new(self._reporter, address, _PROBE_BYTES)
            grown = [i for i, word in enumerate(self._words) if word - before[i] == _PROBE_BYTES]
            self._delete(self._reporter, address)
            if len(grown) == 1 and self._words[grown[0]] == before[grown[0]]:
                return grown[0]
        raise ValueError("the account's layout is not the expected one")


def open_cpu_account(alive: Iterable[tuple[int, int]]) -> CpuAccount | None:
    """Make torch's CPU allocator keep its account from now on; None where this build does not let us.

    `alive` are (address, bytes) of the blocks that are there already: the allocator is told of them, or it
    would neither count them nor, when they are freed, know their size (and say so on stderr).
    """
    if os.environ.get("TORCH_CPP_LOG_LEVEL", "").upper() in ("INFO", "0"):
        return None  # every allocation would be logged to the script's stderr
    try:
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        flag = ctypes.c_bool.in_dll(library, _FLAG)
    except (OSError, ValueError):
        return None
    was_open, flag.value = flag.value, True
    try:
        account = CpuAccount(library, flag, was_open=was_open)
    except (ValueError, AttributeError):
        flag.value = was_open
        return None
    if not was_open:
        for address, size_bytes in alive:
            account.add(address, size_bytes)
    return account
