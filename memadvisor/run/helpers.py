"""Processes that are there for the time of a block, whatever ends it."""

from __future__ import annotations

import contextlib
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
