"""Real processes exchange real messages; what cannot be measured is one line."""

import datetime
import multiprocessing.spawn

import pytest

from memadvisor.calibrate import links
from memadvisor.calibrate.calibrate import calibrate
from memadvisor.calibrate.links import OPERATIONS, measure_collectives
from memadvisor.errors import MemadvisorError, UsageError
from tests.warm_python import warm_python


@pytest.fixture(autouse=True)
def ranks_are_warm():
    """Importing torch takes four processes ten seconds of two cores."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.spawn.set_executable(warm_python())
    yield
    multiprocessing.spawn.set_executable(before)


def test_two_gloo_processes_measure_every_collective_at_every_size():
    sizes = (4096, 2**22)
    curves, others, overlap = measure_collectives("cpu", 2, sizes_bytes=sizes, budget_s=1.0)

    assert others == ()
    assert tuple(curve.operation for curve in curves) == OPERATIONS
    for curve in curves:
        assert (curve.num_ranks, curve.sizes_bytes) == (2, sizes)
        assert all(0 < duration < 10 for duration in curve.durations_s)
        assert curve.durations_s[1] >= curve.durations_s[0]
        assert curve.durations_s[1] > 2**22 / 1e12  # no processor moves a terabyte a second
    assert 1 <= overlap.compute < 100 and 1 <= overlap.collective < 100
    assert overlap.late_s is not None and 0 <= overlap.late_s < 10
    assert overlap.spread is not None and 0 <= overlap.spread < 10


def test_among_four_ranks_other_algorithms_are_measured_beside_the_usual_ones():
    curves, others, _ = measure_collectives("cpu", 4, sizes_bytes=(4096,), budget_s=0.2)

    assert tuple(curve.operation for curve in curves) == OPERATIONS
    found = {(curve.operation, curve.algorithm, curve.num_ranks) for curve in others}
    assert found == {("all_gather", "doubling", 4), ("reduce_scatter", "together", 4)}


def test_processes_that_take_too_long_are_not_said_to_have_failed(monkeypatch):
    """On a busy machine: nothing stands above the error that could be read."""
    monkeypatch.setattr(links, "_TIMEOUT", datetime.timedelta(seconds=-1000))

    with pytest.raises(MemadvisorError, match=r"2 processes did not measure .* within -995 s") as raised:
        measure_collectives("cpu", 2, sizes_bytes=(4096,), budget_s=5.0)
    assert "busy" in raised.value.hint


def test_no_process_at_all_is_refused():
    with pytest.raises(UsageError, match="--ranks 0"):
        calibrate(0)
