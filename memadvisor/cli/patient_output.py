"""Output that takes whatever is printed: a reader that stops early, or none, is no error of the command's."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from memadvisor.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Patient(io.FileIO):
    """Takes whatever is written. Once nobody reads it, or no disk holds it, it drops the rest and keeps why."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
        return memoryview(data).nbytes


def patient(stream: TextIO) -> tuple[TextIO, _Patient]:
    """The same output with the same encoding, which raises no OSError; and what keeps why it might have."""
    stream.flush()
    file = _Patient(stream.fileno(), "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding=stream.encoding, errors=stream.errors), file


@contextlib.contextmanager
def patient_stdout() -> Iterator[None]:
    """While a command prints: `| head` may have read enough, or the shell have closed stdout, and its exit code says of
    the run what it said. Raises UsageError at the end where something else kept output from being written.
    """
    stdout: TextIO | None = sys.stdout
    if stdout is None:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
        return
    if stdout.isatty() or not _is_of_the_process(stdout):
        yield
        return
    taking, file = patient(stdout)
    try:
        with contextlib.redirect_stdout(taking):
            yield
    finally:
        taking.flush()
    if file.failure is not None and not isinstance(file.failure, BrokenPipeError):
        raise UsageError(
            f"stdout cannot be written: {file.failure.strerror}.", hint="send it elsewhere, or make room."
        )


def _is_of_the_process(stdout: TextIO) -> bool:
    """Not one that a test, or a caller of `main`, has put in its place."""
    return stdout is sys.__stdout__
