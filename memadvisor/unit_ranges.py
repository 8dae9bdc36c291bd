"""Names of many units in few words."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)
_FEWEST = 3  # that are worth a range


def unit_ranges(names: Iterable[str]) -> str:
    """`embedding, blocks.0 to 6, head`: a run of names whose last number counts up by one is said once."""
    runs: list[list[str]] = []
    for name in names:
        if runs and name == _next_of(runs[-1][-1]):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(words for run in runs for words in _words_of(run))


def _next_of(name: str) -> str | None:
    match = _NUMBERED.fullmatch(name)
    return None if match is None else f"{match[1]}{int(match[2]) + 1}"


def _words_of(run: list[str]) -> list[str]:
    if len(run) < _FEWEST:
        return run
    match = _NUMBERED.fullmatch(run[-1])
    if match is None:
        raise AssertionError("a run is of names that end in a number")
    return [f"{run[0]} to {match[2]}"]
