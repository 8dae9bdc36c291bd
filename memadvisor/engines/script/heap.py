"""Having glibc keep the memory that a step frees, for the next one, where ranks train on CPUs.

What is gathered, reduced and computed with comes and goes many times a step. As it is, glibc maps each large block
afresh and unmaps it when it is freed, so the kernel fills the same pages with zeros again and again: on a GPT of 51 M
parameters with 2 ranks, a fifth of a step (docs/engines/measured.md). CUDA's allocator keeps what is freed too.

The price is resident memory, up to the heap's highest use and its gaps; what torch's allocator counts, and so every
peak that memadvisor predicts or measures, stays as it is. Who shards because memory is short must not pay it: it is kept
only where the host has room for twice the model states that all its ranks would have without sharding.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

import torch

from memadvisor.engines.script.undo import Undo
from memadvisor.hardware.host_memory import free_host_bytes

# The parameters of mallopt(3), and what glibc's own rule ends at once a block of 32 MiB has been freed.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER = -1
_LARGEST_THRESHOLD = 32 * 2**20
_DEFAULT_MMAP_MAX = 65536
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")

_num_keeping = 0


def keep_freed_memory(devices: Iterable[torch.device], parameter_bytes: int, undo: Undo) -> bool:
    """Keep freed memory from now until `undo`; whether it does, which needs CPU tensors, glibc and room.

    `parameter_bytes` are the model's; with gradients and two states of an optimizer it has four times as many.
    Left alone where the environment sets glibc's thresholds (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_MAX_ or
    MALLOC_MMAP_THRESHOLD_, or any of GLIBC_TUNABLES' glibc.malloc).
    """
    global _num_keeping
    libc = _glibc()
    if libc is None or all(device.type != "cpu" for device in devices) or _is_set_by_user():
        return False
    if (free_host_bytes() or 0) < 2 * 4 * _num_ranks_here() * parameter_bytes:
        return False
    _num_keeping += 1
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    libc.mallopt(_MMAP_MAX, 0)
    undo.add(_let_go)
    return True


def _let_go() -> None:
    """Back to what glibc does by itself; what is free goes to the system."""
    global _num_keeping
    _num_keeping -= 1
    libc = _glibc()
    if libc is None or _num_keeping:
        return
    # mallopt tells no old values, and ends the rule by which the thresholds grow: so they are set to its last ones.
    libc.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
    libc.mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
    libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
    libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """None on another C library, whose mallopt may mean other things or nothing."""
    try:
        libc = ctypes.CDLL(None)
    except OSError:
        return None
    named = ("gnu_get_libc_version", "mallopt", "malloc_trim")
    return libc if all(hasattr(libc, name) for name in named) else None


def _num_ranks_here() -> int:
    """Ranks on this host, as its launcher says; all of them where it does not."""
    known = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return int(known) if known.isdecimal() else 1


def _is_set_by_user() -> bool:
    return any(name in os.environ for name in _USERS_OWN) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
