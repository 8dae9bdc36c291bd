"""Splits of the micro-batch that are not searched, because no plan of theirs would be shown."""

import dataclasses

import pytest

from memadvisor.analyzers.segments import RecordedStep, captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.hardware.hardware import OverlapSlowdown
from memadvisor.planning.advise import advise
from memadvisor.planning.plays import Plays
from memadvisor.planning.search import Search
from memadvisor.planning.split_bounds import SplitBounds
from tests.make_run import make_run
from tests.planning.test_advise import MEASURED

RUN = make_run(num_blocks=2)


@pytest.mark.parametrize("compute, collective", [(1.0, 1.0), (1.6, 1.5), (2.5, 2.5)])
@pytest.mark.parametrize("budget", [2_000_000, 2_500_000, 3_000_000, 4_000_000])
def test_what_is_shown_is_what_a_search_of_all_splits_shows(compute, collective, budget, monkeypatch):
    hardware = dataclasses.replace(MEASURED, overlap=OverlapSlowdown(compute=compute, collective=collective))
    bounded = advise(RUN, memory_bytes=budget, num_ranks=2, hardware=hardware)
    monkeypatch.setattr(SplitBounds, "beat", lambda self, step, way: False)
    monkeypatch.setattr(SplitBounds, "beat_all", lambda self: False)
    full = advise(RUN, memory_bytes=budget, num_ranks=2, hardware=hardware)

    assert bounded.plans == full.plans
    assert bounded.smallest_budget_bytes == full.smallest_budget_bytes


def test_of_splits_of_which_none_would_be_shown_the_last_alone_is_cut(monkeypatch):
    cut = []

    class Counting(RecordedStep):
        def captured(self, micro_batch_divisor=1, repeats=None):
            cut.append(micro_batch_divisor)
            return super().captured(micro_batch_divisor, repeats)

    monkeypatch.setattr("memadvisor.planning.advise.RecordedStep", Counting)
    advise(RUN, memory_bytes=10**9, num_ranks=2, hardware=MEASURED)

    assert cut == [1, 4]  # and none of half a micro-batch


def test_splits_that_the_whole_micro_batch_beats_are_hardly_played(monkeypatch):
    times = times_from_curves(MEASURED.collectives, 2, "a test")
    played = []

    class Counting(Plays):
        def play(self, step, arrangement, limit=None):
            played.append(step.repeats)
            return super().play(step, arrangement, limit)

    search = Search(Counting(RUN, times, 2, 10**9))
    search.plans(captured_step(RUN))
    whole = len(played)
    search.plans(captured_step(RUN, micro_batch_divisor=2))

    assert len(played) - whole < whole / 2


@pytest.mark.parametrize(("share", "is_asked"), [(0.8, False), (0.4, True)])
def test_a_split_all_of_whose_ways_fit_is_asked_for_no_least_peak_where_another_follows(
    share, is_asked, monkeypatch
):
    """And the advice is the same as with it."""
    run = make_run(num_ranks=2, num_blocks=2, sequence=128)
    budget = int(share * run.ranks[0].traced_step.peak_allocated_bytes)
    search = Search(Plays(run, times_from_curves(MEASURED.collectives, 2, "a test"), 2, budget))
    search.plans(captured_step(run))
    num_needs = len(search.needs)
    search.plans(captured_step(run, micro_batch_divisor=4), splits_further=True)
    advice = advise(run, memory_bytes=budget, hardware=MEASURED)
    monkeypatch.setattr(Search, "_split_that_fits", lambda *asked: None)

    assert (len(search.needs) > num_needs) is is_asked
    assert advice == advise(run, memory_bytes=budget, hardware=MEASURED)
