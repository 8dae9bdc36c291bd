import dataclasses

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.clocks import align_clocks
from memadvisor.analyzers.communication import communication
from memadvisor.analyzers.matching import match_collectives
from memadvisor.analyzers.skew import skew
from tests.analyzers.test_clocks import meetings, ranks_with
from tests.make_run import make_run
from tests.play_step import TRACED_SLOWDOWN


def test_the_rank_that_starts_late_is_the_straggler():
    """Three ranks, each 1 ms later than the one before; five all_reduces of the traced step meet."""
    skew = analyze(make_run(num_ranks=3, rank_delay_s=0.001)).skew

    delay_s = 0.001 * TRACED_SLOWDOWN
    caused = [row.caused_waiting_s for row in skew.ranks]
    assert skew.straggler == 2
    assert caused == pytest.approx([0.0, 0.0, 5 * (2 * delay_s + delay_s)])
    assert skew.ranks[0].waiting_s > skew.ranks[1].waiting_s > skew.ranks[2].waiting_s == 0


def test_who_waits_in_several_collectives_at_once_waits_once():
    """Two reductions under way together: of two ranks, what one waited is what the other one was waited for."""
    calls = meetings(2, 2, seed=0)
    for rank, start_s in enumerate((100.0, 101.0)):
        calls[rank] = [
            dataclasses.replace(call, issue_s=start_s + 0.1 * number, end_s=102.0)
            for number, call in enumerate(calls[rank])
        ]
    matched = match_collectives(ranks := ranks_with(calls, [0.0, 0.0]))
    sent = [communication(rank, matched) for rank in ranks]
    found = skew(ranks, align_clocks(ranks), matched, [None, None], sent, [None, None])

    assert [row.waiting_s for row in found.ranks] == pytest.approx([1.1, 0.0])
    assert [row.caused_waiting_s for row in found.ranks] == pytest.approx([0.0, 1.1])


def test_ranks_in_step_have_no_straggler():
    skew = analyze(make_run(num_ranks=4)).skew

    assert skew.straggler is None
    assert skew.peak_spread == 0
    assert skew.step_time_spread == pytest.approx(0)


def test_a_spread_is_the_range_over_the_median():
    """Peaks of 4 052 872 bytes and 10 % more: 0.1 / 1.05."""
    run = make_run()
    first, second = run.ranks
    steps = tuple(
        dataclasses.replace(step, peak_allocated_bytes=step.peak_allocated_bytes * 11 // 10)
        if step.traced
        else step
        for step in second.steps
    )
    run = dataclasses.replace(run, ranks=(first, dataclasses.replace(second, steps=steps)))

    assert analyze(run).skew.peak_spread == pytest.approx(0.1 / 1.05, rel=1e-6)


def test_a_single_rank_has_no_skew():
    assert analyze(make_run(num_ranks=1)).skew is None


def test_untraced_ranks_have_step_times_alone():
    skew = analyze(make_run(traced_step=None)).skew

    assert skew.ranks[0].step_time_s is not None
    assert (skew.ranks[0].compute_s, skew.ranks[0].caused_waiting_s) == (None, None)
    assert skew.straggler is None
