"""Optimizer state on another tier: what leaves memory, and what the transfers cost."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.coded_states import TABLES_BYTES, scratch_bytes
from memadvisor.cost.flats import piece_elements
from memadvisor.cost.simulate import simulate
from memadvisor.cost.transfers import TransferTimes, transfer_times
from memadvisor.hardware.hardware import PageCache, TierBandwidth
from memadvisor.schedule import ActionKind, Lane, Point
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES
from tests.engines.trainings import make_plan
from tests.hardware.test_load import MEASURED
from tests.make_run import make_run


def play(step, *, ranks=1, stage=0, tier="disk", read=1e30, write=1e30):
    bandwidth = TierBandwidth(read_bytes_per_s=read, write_bytes_per_s=write)
    plan = make_plan(ranks, stage, optimizer_tier=tier)
    schedule = write_schedule(plan, step.units)
    return simulate(
        step, schedule, TIMES, transfers=TransferTimes({Lane.DISK: bandwidth}, "a test")
    ), schedule


def state_of(step, name):
    return step.states[name].optimizer_bytes


@given(st.sampled_from([(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]), st.integers(1, 3))
@settings(max_examples=12, deadline=None)
def test_all_of_the_state_is_gone_but_for_two_units_in_the_step(world, batches):
    ranks, stage = world
    step = captured_step(make_run(num_ranks=ranks, num_micro_batches=batches))
    plain, _ = play(step, ranks=ranks, stage=stage, tier="device")
    away, schedule = play(step, ranks=ranks, stage=stage)

    num_owners = ranks if stage else 1
    order = [a.unit for a in schedule.at(Point.BEFORE_OPTIMIZER) if a.kind is ActionKind.UPDATE]
    sizes = [-(-state_of(step, name) // num_owners) for name in order]
    assert sorted(order) == sorted(unit.name for unit in step.units)
    before = {m.position: m.by_category_bytes.get("optimizer_state", 0) for m in plain.moments}
    after = {m.position: m.by_category_bytes.get("optimizer_state", 0) for m in away.moments}
    for position, size_bytes in after.items():
        held = max(sizes[0::2]) + max(sizes[1::2]) if position == "optimizer step" else 0
        assert before[position] - size_bytes == sum(sizes) - held, position
    assert away.step_time_s == pytest.approx(plain.step_time_s)  # as the disk takes no time


@given(st.floats(1e6, 1e10), st.floats(1e6, 1e10))
@settings(max_examples=20, deadline=None)
def test_transfers_take_the_time_that_updates_do_not_hide(read, write):
    """The disk does one thing at a time, and nothing of the first read or the last write is hidden."""
    step = captured_step(make_run())
    plain, _ = play(step, tier="device")
    slow, schedule = play(step, read=read, write=write)

    order = list(schedule.offloaded_states)
    first, last = state_of(step, order[0]), state_of(step, order[-1])
    total = sum(state_of(step, name) for name in order)
    transfers_s = total / read + total / write
    exposed_s = slow.exposed_transfer_s
    assert slow.step_time_s == pytest.approx(plain.step_time_s + exposed_s)
    assert exposed_s <= transfers_s * (1 + 1e-9)
    update_s = sum(s.duration_s for s in step.segments if s.phase == "optimizer")
    assert exposed_s >= max(first / read + last / write, transfers_s - update_s) * (1 - 1e-9)


@given(st.floats(1e6, 1e10), st.sampled_from([(False, 0), (True, 1), (True, 2)]))
@settings(max_examples=20, deadline=None)
def test_parameters_elsewhere_are_read_twice_a_step_and_gradients_written_once(speed, way):
    """Beside their update; a step takes no longer than all of that and the plain step, and is no faster than either."""
    overlap, depth = way
    step = captured_step(make_run())
    plain, _ = play(step, tier="device")
    plan = make_plan(1, 3, optimizer_tier="disk", parameter_tier="disk", overlap=overlap, gather_depth=depth)
    bandwidth = TierBandwidth(read_bytes_per_s=speed, write_bytes_per_s=speed)
    played = simulate(
        step,
        write_schedule(plan, step.units),
        None,
        transfers=TransferTimes({Lane.DISK: bandwidth}, "a test"),
    )

    parameters = sum(states.parameter_bytes for states in step.states.values())
    state = sum(state_of(step, name) for name in step.states)
    reads = [i for i in played.lanes.intervals if i.label.startswith("gather")]
    writes = [i for i in played.lanes.intervals if i.label.startswith("reduce")]
    assert sum(i.end_s - i.start_s for i in writes) == pytest.approx(parameters / speed)
    shared = {unit.name for unit in step.units if unit.is_shared}
    own = sum(states.parameter_bytes for name, states in step.states.items() if name not in shared)
    assert sum(i.end_s - i.start_s for i in reads) == pytest.approx((parameters + own) / speed)
    transfers_s = (2 * parameters + own + 3 * parameters + 2 * state) / speed
    busy_s = sum(i.end_s - i.start_s for i in played.lanes.intervals if i.lane is Lane.DISK)
    assert busy_s == pytest.approx(transfers_s)
    assert played.step_time_s == pytest.approx(plain.step_time_s + played.exposed_transfer_s)
    assert max(0.0, transfers_s - plain.step_time_s) * (1 - 1e-9) <= played.exposed_transfer_s
    assert played.exposed_transfer_s <= transfers_s * (1 + 1e-9)
    resting = [m for m in played.moments if m.position == "work outside forward, backward and optimizer"]
    stand_in_bytes = sum(states.stand_in_bytes("cpu", None) for states in step.states.values())
    assert all(m.by_category_bytes["parameter"] == stand_in_bytes for m in resting)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 2)])
def test_state_in_codes_is_expanded_one_unit_after_another(ranks, stage):
    """Codes at rest; in the step one buffer as large as the largest unit's state; and compute decodes and codes all."""
    step = captured_step(make_run(num_ranks=ranks))
    plain, _ = play(step, ranks=ranks, stage=stage, tier="device")
    read, write = 1e6, 5e5
    bandwidth = TierBandwidth(read_bytes_per_s=read, write_bytes_per_s=write)
    schedule = write_schedule(make_plan(ranks, stage, optimizer_bits=8), step.units)
    coder = TransferTimes({Lane.COMPUTE: bandwidth}, "a test")
    coded = simulate(step, schedule, TIMES, transfers=coder)

    num_owners = ranks if stage else 1
    decoded, resting, largest = [], 0, 0
    for states in step.states.values():
        pieces = piece_elements(states, num_owners, 0)  # the first rank has most
        whole = {p.name: p.num_elements for p in states.parameters}
        large = [count for name, count in pieces.items() if whole[name] >= 4096]
        decoded.append(2 * 4 * sum(large))
        resting += 2 * (sum(count + 4 * -(-count // 256) for count in large))
        resting += 2 * 4 * (sum(pieces.values()) - sum(large))
        largest = max(largest, *large, 0) if large else largest
    before = {m.position: m.by_category_bytes.get("optimizer_state", 0) for m in plain.moments}
    total = sum(-(-state_of(step, name) // num_owners) for name in step.states)
    for moment in coded.moments:
        held = max(decoded) if moment.position == "optimizer step" else 0
        found = moment.by_category_bytes["optimizer_state"]
        assert found == before[moment.position] - total + resting + held, moment.position
        assert moment.by_category_bytes["other"] >= TABLES_BYTES
    scratch = scratch_bytes(largest, "cpu")
    coding = [m for m in coded.moments if m.by_category_bytes.get("temporary") == scratch]
    assert coding and all(moment.position == "optimizer step" for moment in coding)
    added_s = coded.step_time_s - plain.step_time_s
    assert added_s == pytest.approx(sum(decoded) / read + sum(decoded) / write)
    assert coded.exposed_transfer_s == 0


def test_larger_units_take_turns_with_smaller_ones():
    """So that the two buffers are not both as large as the largest unit's state."""
    step = captured_step(make_run(num_blocks=3))
    _, schedule = play(step)
    sizes = [state_of(step, name) for name in schedule.offloaded_states]

    assert min(sizes[1::2]) >= max(sizes[0::2])


def test_what_fits_in_half_of_the_free_memory_goes_as_fast_as_the_page_cache():
    slow, fast = (TierBandwidth(read_bytes_per_s=r, write_bytes_per_s=r) for r in (1e8, 1e9))
    cache = PageCache(bandwidth=fast, size_bytes=1000)
    hardware = replace(MEASURED, disk=slow, page_cache=cache)

    assert transfer_times(hardware, 500).read_s(Lane.DISK, 10**9) == 1
    assert transfer_times(hardware, 501).read_s(Lane.DISK, 10**9) == 10
    assert transfer_times(replace(hardware, page_cache=None), 1).write_s(Lane.DISK, 10**9) == 10
    assert transfer_times(replace(hardware, disk=None, coder=None), 1) is None
