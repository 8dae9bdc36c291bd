"""Processes that are there for the time of a block, whatever ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess


@contextlib.contextmanager
def started(processes: Sequence[BaseProcess]) -> Iterator[None]:
    """Start them, and end those that still run when the block is left: an error, Ctrl-C or SIGTERM would leave them to
    work on, in a directory that is taken away under them."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        begun = [process for process in processes if process.pid is not None]
        for process in begun:
            process.terminate()
        for process in begun:
            process.join()


def end_with_parent() -> None:
    """In such a process: be gone when who started it is. Killed, it can end nobody, and ranks would wait for each other, or
    compute, for minutes."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def leave() -> None:
        parent.join()  # in the kernel, without the interpreter's lock: what is measured here does not notice
        os._exit(1)

    threading.Thread(target=leave, name="memadvisor-parent", daemon=True).start()
