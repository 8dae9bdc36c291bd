"""What a rank's steps say of themselves."""

import dataclasses

from memadvisor.run.documents import Note
from memadvisor.run.records import Span
from tests.make_run import make_run

RANK = make_run(num_ranks=1).ranks[0]


def with_steps(traced, total=8):
    steps = tuple(
        dataclasses.replace(RANK.steps[0], index=n, traced=n in traced, start_s=float(n), end_s=n + 0.5)
        for n in range(total)
    )
    return dataclasses.replace(RANK, steps=steps)


def test_the_last_traced_step_is_the_traced_step():
    assert with_steps({2, 5}).traced_step.index == 5
    assert with_steps(set()).traced_step is None


def test_steady_steps_come_after_warm_up_and_after_what_follows_the_traced_step():
    assert [step.index for step in with_steps(set()).steady_steps()] == [2, 3, 4, 5, 6, 7]
    assert [step.index for step in with_steps({3}).steady_steps()] == [5, 6, 7]


def test_where_no_step_is_left_after_the_traced_one_those_before_it_are_steady():
    assert [step.index for step in with_steps({6}).steady_steps()] == [2, 3, 4, 5]


def test_a_step_whose_trace_was_left_out_is_not_steady():
    """It took longer than the script's own; the journal says of it, alone, that its own cost is not known."""
    rank = with_steps(set(), total=5)
    steps = [dataclasses.replace(s, recorder_s=None) if s.index == 3 else s for s in rank.steps]

    assert [step.index for step in dataclasses.replace(rank, steps=tuple(steps)).steady_steps()] == [2, 4]


def test_times_of_units_come_from_the_steady_steps_that_have_any():
    span = Span(5, "unit_forward", "a", 0, 5.1, 5.2)
    listened = dataclasses.replace(with_steps({2}), spans=(span,))

    assert [step.index for step in listened.steps_with_units()] == [5]
    assert dataclasses.replace(listened, spans=()).steps_with_units() == listened.steady_steps()


def test_a_short_run_has_its_last_timed_step_for_a_steady_one():
    assert [step.index for step in with_steps({2}, total=3).steady_steps()] == [1]
    assert with_steps({0}, total=1).steady_steps() == ()


def test_a_run_with_a_rank_that_never_ended_is_not_finished():
    run = make_run(num_ranks=2)
    unended = dataclasses.replace(run.ranks[1], ending=None)

    assert run.is_finished
    assert not dataclasses.replace(run, ranks=(run.ranks[0], unended)).is_finished
    assert not dataclasses.replace(run, missing_ranks=(2,)).is_finished


def test_a_run_and_its_ranks_are_shown_in_a_line():
    """A prompt prints what it is given; the rows of a deep model took 38 MB there."""
    run = make_run(num_ranks=2)
    alone = dataclasses.replace(run, ranks=run.ranks[:1], missing_ranks=(1,))

    assert repr(run).startswith(f"<run {run.path}: {run.manifest.script}, 2 ranks, ")
    assert ", 1 rank, 1 missing, " in repr(alone)
    assert repr(with_steps({2, 5})).startswith("<rank 0 on cpu: 8 steps, step 5 traced")
    assert repr(with_steps(set(), total=1)) == "<rank 0 on cpu: 1 step, none traced>"


def test_a_run_too_short_for_a_steady_step_has_its_last_timed_one_and_says_which():
    assert with_steps(set(), total=3).unsteady_step is None
    for traced, total, index in ((set(), 1, 0), (set(), 2, 1), ({2}, 4, 3), ({0}, 2, 1)):
        rank = with_steps(traced, total)
        assert rank.unsteady_step.index == index
        assert [step.index for step in rank.steady_steps()] == [index]
    assert with_steps({0}, total=1).unsteady_step is None


def test_a_run_that_ended_before_the_traced_step_names_the_option_that_traces_its_last():
    assert with_steps(set(), total=1).trace_option == "--trace-step 0"
    assert with_steps(set(), total=2).trace_option == "--trace-step 1"
    assert with_steps(set(), total=8).trace_option == "--trace-step 2"
    assert with_steps({2}).trace_option is None
    assert with_steps(set(), total=0).trace_option is None
    assert dataclasses.replace(with_steps(set(), total=2), ending=None).trace_option is None
    failed = Note(level="warning", text="No step was traced: torch.func is at work.", time_s=None)
    assert dataclasses.replace(with_steps(set(), total=2), notes=(failed,)).trace_option is None
