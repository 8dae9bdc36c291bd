"""Times that hang on nothing but what operators move and multiply: what is offered and chosen by time is then one thing.

What a recording's steps took is anything on a busy machine, and a search within so many tries may do better on some of it
than on other.
"""

from collections.abc import Iterable

import pytest

from memadvisor.analyzers import segments
from memadvisor.analyzers.time_shares import TimeShares
from memadvisor.cost.second_run import FREE
from memadvisor.run.records import Operator


def steady_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of a test: every operator, and every piece of a step, takes what its operators move and multiply."""
    monkeypatch.setattr(TimeShares, "of", lambda _, rows: {id(row): _seconds(row) for row in rows})
    monkeypatch.setattr(segments, "typical_durations", _durations)
    monkeypatch.setattr(segments, "second_run_cost", lambda rank: FREE)


def _durations(rank, pieces, checkpointing=()) -> tuple[list[float], float]:
    own = [_total(rank.operators, piece.start_s, piece.end_s) for piece in pieces]
    return own, sum(own)


def _total(operators: Iterable[Operator], start_s: float, end_s: float) -> float:
    return 1e-7 + sum(_seconds(row) for row in operators if start_s <= row.start_s < end_s)


def _seconds(row: Operator) -> float:
    return 1e-6 + ((row.read_bytes or 0) + (row.written_bytes or 0)) / 1e10 + row.executed_flops / 1e11
