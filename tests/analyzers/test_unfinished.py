import dataclasses

from memadvisor.analyzers.unfinished import unfinished_ranks
from memadvisor.report.words import unfinished_in_words
from tests.make_run import make_run, stopped


def test_a_rank_whose_recorder_gave_up_is_not_said_to_run_or_to_be_killed():
    """The record ends where the recorder did; how the script went on, nothing in it says."""
    run = make_run(exit_code=None, num_ranks=3)
    first, *others = (dataclasses.replace(rank, is_alive=True) for rank in run.ranks)
    given_up, running, _ = found = unfinished_ranks(dataclasses.replace(run, ranks=(stopped(first), *others)))

    assert [rank.has_stopped for rank in found] == [True, False, False]
    assert unfinished_in_words(given_up).startswith("not recorded to its end; 8 steps, last record")
    assert unfinished_in_words(running).startswith("no ending yet: still at it, or hanging; 8 steps")


def test_a_rank_that_ended_has_an_ending_whatever_was_noted():
    """A note of an error before the end is of something else: the ending is on record."""
    run = make_run(num_ranks=1)

    assert not stopped(run.ranks[0]).has_stopped
    assert unfinished_ranks(run) == ()
