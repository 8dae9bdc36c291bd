"""When a step is said to leave memory behind."""

import dataclasses

from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.analyzers.script_changes.found import script_changes
from memadvisor.analyzers.timeline import memory_timeline
from memadvisor.run.run import RankRun
from tests.analyzers.script_changes.test_held_results import rank_of
from tests.make_run import step, storage

KEPT = storage(birth_s=0.1, last_use_s=0.2, size_bytes=400)


def grows(rank: RankRun) -> bool:
    found = script_changes(traced_calls(rank), memory_timeline(rank), has_plan=False)
    return any(change.kind == "growth" for change in found)


def with_totals(rank: RankRun, *totals_bytes: int) -> RankRun:
    """What the allocator had at the end of the traced step and of later ones."""
    steps = [
        step(index=index, start_s=index, end_s=index + 1.0, traced=index == 0, allocated_bytes=total)
        for index, total in enumerate(totals_bytes)
    ]
    return dataclasses.replace(rank, steps=tuple(steps))


def test_what_a_step_leaves_behind_is_growth():
    assert grows(rank_of(KEPT))


def test_what_takes_the_place_of_another_is_none():
    assert not grows(rank_of(KEPT, storage(storage_id=1, phase="baseline", size_bytes=400, death_s=0.1)))


def test_what_takes_the_place_of_a_smaller_one_is_none():
    """A larger batch, say."""
    assert not grows(rank_of(KEPT, storage(storage_id=1, phase="baseline", size_bytes=100, death_s=0.1)))


def test_new_states_of_the_optimizer_are_none():
    assert not grows(rank_of(dataclasses.replace(KEPT, category="optimizer_state")))


def test_later_steps_that_end_no_higher_refute_it():
    assert grows(with_totals(rank_of(KEPT), 5000, 5400, 5800))
    assert not grows(with_totals(rank_of(KEPT), 5000, 5000, 5000))
