"""What Python warns of where the script forks: of the script's own threads, and not of ours.

From Python 3.12 on each fork of a process of several threads is warned of, once the fork is done. The library of
torch's profiler keeps a thread from a first recording on (truth.py), and so does a lane of an engine: a script that
has one thread alone, as those have that set OMP_NUM_THREADS=1, would be warned of what it has not started.

Whether a fork is to be warned of is settled just before it. The rule stays in force until another fork is: what
Python calls behind a fork comes before the warning in some versions, and it is of no other warning.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from memadvisor.capture.own_warnings import Silence

_TASKS = Path("/proc/self/task")  # Linux's, one entry a thread
_OURS = "memadvisor-"  # what names of the threads begin with that Python knows of
_ABOUT_US = Silence(r"This process \(pid=\d+\) is multi-threaded, use of fork", DeprecationWarning)
_native: set[int] = set()  # threads of ours that Python does not know of
_is_heeded: list[bool] = []


@contextlib.contextmanager
def threads_are_ours() -> Iterator[None]:
    """What libraries start inside works for memadvisor, for as long as the process lives."""
    if sys.version_info < (3, 12) or not _TASKS.is_dir():
        yield
        return
    if not _is_heeded:
        _is_heeded.append(True)
        os.register_at_fork(before=_settle, after_in_child=_begin_anew)
    before = _threads()
    try:
        yield
    finally:
        known = {thread.native_id for thread in threading.enumerate()}
        _native.update(_threads() - before - known)


def _threads() -> set[int]:
    return {int(task.name) for task in _TASKS.iterdir()}


def _settle() -> None:
    named = {t.native_id for t in threading.enumerate() if t.name.startswith(_OURS)}
    if len(_threads() - _native - named) <= 1:
        _ABOUT_US.begin()
    else:
        _ABOUT_US.end()


def _begin_anew() -> None:
    """A fork copies none but the thread that forks."""
    _native.clear()
    _ABOUT_US.end()
