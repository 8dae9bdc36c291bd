"""Runs of several ranks whose peaks are compared, which are tried again.

A thread of Gloo's lets go of a buffer late now and then, which makes one step of one rank that buffer higher: in about one
of three plain runs, without memadvisor. What must hold in every run, a script asserts within its try.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

TRIES = 3


def some_try(directory: Path, faults_of: Callable[[Path], list[str]]) -> None:
    """Fail unless one of several tries, each in an empty directory of its own, has no faults."""
    said = []
    for number in range(TRIES):
        own = directory / str(number)
        own.mkdir()
        said.append(faults_of(own))
        if not said[-1]:
            return
    pytest.fail(f"in {TRIES} tries: {said}")


def far_apart(predicted: float, measured: float, rel: float) -> list[str]:
    """A fault, or none."""
    is_near = predicted == pytest.approx(measured, rel=rel)
    return [] if is_near else [f"{predicted} predicted, {measured} measured"]
