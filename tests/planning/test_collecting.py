"""Garbage is collected seldom within a search, and as before afterwards."""

import gc

import pytest

from memadvisor.planning.collecting import collecting_seldom


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
