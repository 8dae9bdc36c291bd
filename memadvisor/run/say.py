"""Lines for the user while a script of theirs runs, whatever it, or the shell, has done to stderr."""

from __future__ import annotations

import contextlib
import os
import sys


def say(text: str) -> None:
    """On stderr, and never an error: the script's exit code is its own, where nobody reads stderr or no disk holds it too.

    Not print(), which the script may have replaced. Nothing is said where stderr was closed when Python started: what has
    its number then is some file of the script's, or the run's.
    """
    if sys.__stderr__ is not None:
        with contextlib.suppress(OSError):
            os.write(2, _bytes_of(f"{text}\n"))


def _bytes_of(text: str) -> bytes:
    """Names of files that are no UTF-8 as the shell has given them, so that they can be copied from here."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a surrogate of the script's own
        return text.encode(errors="replace")
