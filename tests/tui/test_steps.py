import pytest

from memadvisor.run.loader_records import DataWait
from memadvisor.tui.steps import phase_seconds, waits_by_step
from tests.make_run import make_run


@pytest.mark.parametrize("changes", [{}, {"recompute": ("blocks.1",), "num_micro_batches": 3}])
def test_the_phases_of_a_step_sum_to_its_duration(changes):
    rank = make_run(**changes).ranks[0]

    for step in rank.steps:
        seconds = phase_seconds(rank.steps, rank.spans)[step.index]
        assert sum(seconds.values()) == pytest.approx(step.duration_s)
        assert ("recompute" in seconds) == bool(changes)


def test_only_the_steps_asked_for_are_worked_out():
    rank = make_run().ranks[0]

    newest = phase_seconds(rank.steps[-2:], rank.spans)

    assert set(newest) == {6, 7}
    assert newest[7] == phase_seconds(rank.steps, rank.spans)[7]


def test_waits_for_training_batches_outside_of_phases_are_those_shown():
    def wait(step, phase="outside", is_evaluation=False, wait_s=1.0):
        return DataWait(step, 0, phase, is_evaluation, 1, wait_s, wait_s, 0, 0.0)

    rows = [wait(3), wait(3, wait_s=0.5), wait(3, "optimizer"), wait(4, is_evaluation=True), wait(5)]

    assert waits_by_step(rows) == {3: 1.5, 5: 1.0}
