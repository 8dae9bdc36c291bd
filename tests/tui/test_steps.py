import pytest

from memadvisor.run.loader_records import DataWait
from memadvisor.tui.steps import _row, phase_seconds, waits_by_step
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


def cells(step, seconds, phases=("forward", "backward", "recompute", "outside")):
    return [cell.plain for cell in _row(step, seconds, phases, []).cells]


def test_a_rows_backward_has_its_second_runs_in_it_as_the_medians_phases_do():
    step = make_run(recompute=("blocks.1",)).ranks[0].steps[3]

    shown = cells(step, {"forward": 1.0, "backward": 2.0, "recompute": 0.5, "outside": 0.1})

    assert shown[2:6] == ["1.00 s", "2.50 s", "500 ms", "100 ms"]


def test_what_was_forward_and_outside_is_not_known_of_a_step_in_which_no_module_was_listened_to():
    """The forward's time stood under outside there, and as if there had been no forward."""
    step = make_run().ranks[0].steps[3]

    assert cells(step, {"backward": 2.0, "outside": 1.1})[2:6] == ["-", "2.00 s", "", "-"]


def test_traced_steps_are_marked_where_they_are_on_the_screen():
    """A column of its own, behind all others, was out of sight at 80 columns."""
    steps = make_run().ranks[0].steps

    assert [cells(step, {})[0].startswith("*") for step in steps] == [step.traced for step in steps]
