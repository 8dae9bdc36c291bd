"""Garbage is collected seldom within a search, and as before afterwards."""

import gc

import pytest

from memadvisor.planning.advise import advise
from memadvisor.planning.collecting import collecting_seldom
from tests.planning.test_split_bounds import MEASURED, RUN


@pytest.mark.parametrize("threshold", [0, 700, 10**7])
def test_the_collector_is_left_as_it_was(threshold):
    before = gc.get_threshold()
    gc.set_threshold(threshold, 7, 9)
    try:
        with pytest.raises(KeyError), collecting_seldom():
            assert gc.get_threshold() == (max(threshold, 10**6) if threshold else 0, 7, 9)
            raise KeyError
        assert gc.get_threshold() == (threshold, 7, 9)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("share", [0.9, 0.4])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_decision_leaves_no_garbage(num_ranks, share):
    peak_bytes = RUN.ranks[0].traced_step.peak_allocated_bytes

    def decide():
        advise(RUN, memory_bytes=int(share * peak_bytes), num_ranks=num_ranks, hardware=MEASURED)

    decide()  # what is kept of the run from then on
    gc.collect()
    gc.disable()
    try:
        decide()
        assert gc.collect() < 100  # a library's own; simulations are tens of thousands
    finally:
        gc.enable()
