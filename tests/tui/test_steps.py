import pytest

from memadvisor.tui.steps import phase_seconds
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
