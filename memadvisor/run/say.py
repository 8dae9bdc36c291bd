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
            os.write(2, f"{text}\n".encode(errors="replace"))
