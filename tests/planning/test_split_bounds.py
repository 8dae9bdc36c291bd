"""Splits of the micro-batch that are not searched, because no plan of theirs would be shown."""

import dataclasses

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.hardware.hardware import OverlapSlowdown
from memadvisor.planning.advise import advise
from memadvisor.planning.search import Search
from memadvisor.planning.split_bounds import SplitBounds
from tests.make_run import make_run
from tests.planning.test_advise import MEASURED

RUN = make_run(num_blocks=2)


@pytest.mark.parametrize("compute, collective", [(1.0, 1.0), (1.6, 1.5), (2.5, 2.5)])
@pytest.mark.parametrize("budget", [2_500_000, 4_000_000])
def test_what_is_shown_is_what_a_search_of_all_splits_shows(compute, collective, budget, monkeypatch):
    hardware = dataclasses.replace(MEASURED, overlap=OverlapSlowdown(compute=compute, collective=collective))
    bounded = advise(RUN, memory_bytes=budget, num_ranks=2, hardware=hardware)
    monkeypatch.setattr(SplitBounds, "beat", lambda self, step, way: False)
    full = advise(RUN, memory_bytes=budget, num_ranks=2, hardware=hardware)

    assert bounded.plans == full.plans
    assert bounded.smallest_budget_bytes == full.smallest_budget_bytes


def test_splits_that_the_whole_micro_batch_beats_are_hardly_played():
    times = times_from_curves(MEASURED.collectives, 2, "a test")
    played = []

    class Counting(Search):
        def play(self, step, arrangement):
            played.append(step.repeats)
            return super().play(step, arrangement)

    search = Counting(RUN, times, 2, 10**9, None)
    search.plans(captured_step(RUN))
    whole = len(played)
    search.plans(captured_step(RUN, micro_batch_divisor=2))

    assert len(played) - whole < whole / 2
