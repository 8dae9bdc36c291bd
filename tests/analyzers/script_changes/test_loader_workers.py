"""When a step is said to wait for its data, and what its loader lacks."""

import dataclasses

import pytest

from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.analyzers.data_waits import data_waits
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import script_changes
from memadvisor.analyzers.step_time import step_time
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.loader_records import DataWait, LoaderInfo
from tests.make_run import make_run


def found(wait_s: float, num_workers: int) -> ScriptChange | None:
    """Of steps of 0.125 s, 0.03 of them outside the phases, that wait so long each."""
    rank = make_run(num_ranks=1, outside_s=0.03).ranks[0]
    waits = [DataWait(step.index, 0, "outside", False, 1, wait_s, wait_s, 0, 0.0) for step in rank.steps]
    loader = LoaderInfo(0, num_workers, None, False, False, 8)
    rank = dataclasses.replace(rank, data_loaders=(loader,), data_waits=tuple(waits))
    changes = script_changes(
        traced_calls(rank),
        memory_timeline(rank),
        time=step_time(rank),
        waits=data_waits(rank),
        has_plan=False,
    )
    return next((change for change in changes if change.kind == "loader_workers"), None)


def test_a_loader_without_workers_is_given_some():
    change = found(0.02, num_workers=0)

    assert change is not None
    assert change.seen == "A step waits 20.0 ms, 16.0 % of it, for its DataLoader, which has no workers."
    assert "num_workers=N" in change.change
    assert (change.step_saved_s, change.is_at_most) == (pytest.approx(0.02), True)


def test_one_with_workers_is_given_more():
    change = found(0.02, num_workers=1)

    assert change is not None
    assert "which has 1 worker." in change.seen
    assert "more workers" in change.change


def test_a_short_wait_is_not_named():
    assert found(0.004, num_workers=0) is None


def test_where_no_loader_was_read_nothing_is_known():
    run = make_run(num_ranks=1)
    rank = run.ranks[0]
    changes = script_changes(
        traced_calls(rank),
        memory_timeline(rank),
        time=step_time(rank),
        waits=data_waits(rank),
        has_plan=False,
    )

    assert all(change.kind != "loader_workers" for change in changes)
