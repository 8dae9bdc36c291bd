"""The experiment of regret: what it says of what its runs measured."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import regret


def row(name, turn, step_s, peak_bytes=100, batch=0):
    return {
        **{"batch": batch, "round": turn, "name": name, "step_s": step_s, "peak_bytes": peak_bytes},
        **{"cpu_s": 3.0, "num_steps": 2},
    }


SPACE = {
    "plans": {
        "fast": {"peak_bytes": 90, "changes_script": False},
        "slow": {"peak_bytes": 90, "changes_script": False},
        "split": {"peak_bytes": 90, "changes_script": True},
    },
    "budgets": [{"percent": 50, "budget_bytes": 100, "alone": "slow", "free": "split"}],
}


def test_a_machine_that_slows_down_slows_the_reference_too():
    """Twice as slow in the second round: both ratios to the reference are 1.5, of its median of 3."""
    rows = [
        row(regret.REFERENCE, 0, 2.0),
        row("fast", 0, 3.0),
        row(regret.REFERENCE, 1, 4.0),
        row("fast", 1, 6.0),
    ]

    assert regret.times_of(rows)["fast"] == (pytest.approx(4.5), 0, 2, 1.5)


def test_a_later_batch_takes_the_place_of_what_was_known():
    rows = [row(regret.REFERENCE, 0, 1.0, batch=n) for n in (0, 1)]
    rows += [row("fast", 0, 9.0), row("fast", 0, 2.0, batch=1)]

    # A turn in which the reference got nowhere says nothing, also where it is the last.
    rows.append(row("fast", 5, 7.0, batch=2))
    assert regret.times_of(rows)["fast"][0] == 2.0
    assert [
        answer["best"] for answer in regret.questions(SPACE, regret.times_of(rows), {"slow": 9, "fast": 9})
    ] == [
        "fast",
        "fast",
    ]


def test_regret_is_of_the_best_that_was_measured_within_the_budget_and_allowed():
    """Of plans that leave the script alone the best takes 2 s and the advised one 3 s; of all, the split one is best."""
    times = {"fast": (2.0, 0, 1, 1.0), "slow": (3.0, 0, 1, 1.0), "split": (1.0, 0, 1, 1.0)}
    alone, free = regret.questions(SPACE, times, {"fast": 100, "slow": 100, "split": 100})
    assert (alone["best"], alone["regret"], alone["failed"]) == ("fast", 0.5, False)
    assert (free["best"], free["regret"]) == ("split", 0)

    alone, _ = regret.questions(SPACE, times, {"fast": 101, "slow": 101, "split": 100})
    assert alone["failed"] and alone["best"] is None and alone["regret"] is None
