"""The thread that torch's profiler starts with its first use in a process, and leaves behind.

It looks, for as long as the process lives, whether a daemon or a file has the profiler record something. For nothing but
that a script that has one thread would have two: from Python 3.12 on each of its forks would be warned of. So it is ended
with the first step that is recorded, by the library's own function, where the library has it and nobody has asked for the
daemon. A thread that was there before us is the script's own, and stays.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")
_DAEMON = "KINETO_USE_DAEMON"
_INSTANCE = "_ZN9libkineto12ConfigLoader8instanceEv"
_STOP = "_ZN9libkineto12ConfigLoader10stopThreadEv"

_NUM_LOOKS, _PAUSE_S = 100, 1e-3  # it takes some 0.1 ms


def threads() -> frozenset[str]:
    """Those of this process, by the kernel's numbers; none where it does not tell."""
    try:
        return frozenset(task.name for task in _TASKS.iterdir())
    except OSError:
        return frozenset()


def end_thread(number: str) -> None:
    """End the profiler's thread, once it sleeps: told before it waits to be told, it would go on, and we would wait for it."""
    if _DAEMON in os.environ or not _comes_to_sleep(number):
        return
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        instance, stop = getattr(library, _INSTANCE), getattr(library, _STOP)
    except (OSError, AttributeError):
        return
    instance.restype, stop.restype, stop.argtypes = ctypes.c_void_p, None, [ctypes.c_void_p]
    stop(instance())


def _comes_to_sleep(number: str) -> bool:
    for _ in range(_NUM_LOOKS):
        if _sleeps(number):
            return True
        time.sleep(_PAUSE_S)
    return False


def _sleeps(number: str) -> bool:
    try:
        return (_TASKS / number / "stat").read_text().rpartition(")")[2].split()[0] == "S"
    except (OSError, IndexError):
        return False
