import dataclasses

import pytest

from memadvisor.analyzers.roofline import LATENCY_BELOW_FRACTION, OPTIMIZER, roofline
from memadvisor.analyzers.step_time import step_time
from memadvisor.analyzers.utilization import utilization
from memadvisor.hardware.hardware import Hardware
from memadvisor.run.records import Operator
from tests.make_run import make_run

MACHINE = Hardware(
    name="a machine",
    kind="given",
    source="a test",
    memory_bytes=None,
    memory_bandwidth_bytes_per_s=1e9,
    peak_flops_per_s={"float32": 1e10},
)


def roofline_of(rank, hardware=MACHINE):
    time = step_time(rank)
    return roofline(rank, time, utilization(rank, time, hardware), hardware)


def one_operator(flops, read, written, duration_s, name="aten::mm"):
    """A run whose block 0 did this and nothing else in its forward and backward."""
    rank = make_run(num_ranks=1).ranks[0]
    row = Operator(
        name, "blocks.0", "blocks.0", "forward", 0.0, duration_s, flops, flops, None, read, written
    )
    return dataclasses.replace(rank, operators=(row,))


def module_of(rank, hardware=MACHINE):
    (point,) = roofline_of(rank, hardware).modules
    return point


def test_a_point_is_flops_by_byte_and_flops_by_second():
    point = module_of(one_operator(10**9, 3 * 10**6, 10**6, 0.5))

    assert point.intensity_flops_per_byte == 10**9 / (4 * 10**6)
    assert point.attained_flops_per_s == 2e9


def test_the_ridge_parts_compute_from_memory():
    """At 10 FLOP a byte this machine is as slow by arithmetic as by memory."""
    assert roofline_of(make_run(num_ranks=1).ranks[0]).ridge_flops_per_byte == 10
    above = module_of(one_operator(11 * 10**8, 10**8, 0, 0.12))
    below = module_of(one_operator(9 * 10**8, 10**8, 0, 0.12))

    assert (above.roof, above.bound) == ("compute", "compute")
    assert above.roof_fraction == pytest.approx(0.11 / 0.12)
    assert (below.roof, below.bound) == ("memory", "memory")
    assert below.roof_fraction == pytest.approx(0.1 / 0.12)


def test_far_above_both_roofs_it_waits_for_something_else():
    least_s = 0.01
    slow = module_of(one_operator(10**8, 1, 0, least_s / (0.99 * LATENCY_BELOW_FRACTION)))
    quick = module_of(one_operator(10**8, 1, 0, least_s / (1.01 * LATENCY_BELOW_FRACTION)))

    assert (slow.roof, slow.bound) == ("compute", "latency")
    assert quick.bound == "compute"


def test_what_multiplies_nothing_stands_by_its_bytes_alone():
    point = module_of(one_operator(0, 10**8, 10**8, 0.4, "aten::add"))

    assert point.intensity_flops_per_byte == 0
    assert point.bound == "memory"
    assert point.roof_fraction == pytest.approx(0.5)


def test_units_take_the_time_of_timed_steps_and_sum_to_the_steps_flops():
    rank = make_run(num_ranks=1, recompute=("blocks.1",)).ranks[0]
    times = {u.unit: u.forward_s + u.backward_s + u.recompute_s for u in step_time(rank).units}
    found = roofline_of(rank)

    units = {point.name: point for point in found.units}
    assert set(units) == {*times, OPTIMIZER}
    assert all(units[name].time_s == pytest.approx(time_s) for name, time_s in times.items())
    assert units[OPTIMIZER].time_s == pytest.approx(0.008)
    for points in (found.modules, found.units):
        assert sum(p.executed_flops for p in points) == sum(row.executed_flops for row in rank.operators)
    assert units["blocks.1"].executed_flops > units["blocks.0"].executed_flops


def test_an_accelerators_launch_times_place_no_module():
    found = roofline_of(make_run(num_ranks=1, device="cuda:0").ranks[0])

    assert all(point.time_s is None and point.bound is None for point in found.modules)
    assert any(point.roof is not None for point in found.modules)
    assert any(point.bound is not None for point in found.units)


@pytest.mark.parametrize(
    "hardware",
    [
        None,
        dataclasses.replace(MACHINE, memory_bandwidth_bytes_per_s=None),
        dataclasses.replace(MACHINE, peak_flops_per_s={"bfloat16": 1e10}),
    ],
)
def test_without_both_roofs_there_is_no_verdict(hardware):
    found = roofline_of(make_run(num_ranks=1).ranks[0], hardware)

    assert found.ridge_flops_per_byte is None
    assert all((p.roof, p.bound, p.roof_fraction) == (None, None, None) for p in found.units)
    assert all(p.intensity_flops_per_byte is not None for p in found.units)


def test_a_run_without_bytes_has_no_roofline():
    rank = make_run(num_ranks=1).ranks[0]
    old = tuple(dataclasses.replace(row, read_bytes=None, written_bytes=None) for row in rank.operators)

    assert roofline_of(dataclasses.replace(rank, operators=old)) is None
    assert roofline_of(dataclasses.replace(rank, operators=())) is None
