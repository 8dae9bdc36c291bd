"""Laws of the optimizer step inside the backward, as the simulator plays it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.allocation_sequence import planned_sequence
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.simulate import simulate
from memadvisor.write_schedule import write_schedule
from tests.cost.test_allocation_sequence import exact_peak
from tests.cost.test_simulate import TIMES
from tests.engines.trainings import make_plan
from tests.make_run import make_run

FREE = CollectiveTimes(kind="fitted", source="a test", curves={}, alpha_s=0.0, beta_bytes_per_s=1e30)


def play(step, stage, *, early, overlap=False, ranks=2, times=TIMES):
    plan = make_plan(ranks, stage, overlap=overlap, gather_depth=int(overlap), update_in_backward=early)
    return simulate(step, write_schedule(plan, step.units), times)


def shards(step, ranks=2):
    """Bytes of each unit's gradient shard; the units of `make_run` divide evenly."""
    return {unit.name: unit.trainable_bytes // ranks for unit in step.units}


def order_of(result):
    return [m.position.removeprefix("update of ") for m in result.moments if m.position.startswith("update")]


@given(st.sampled_from([2, 3]), st.booleans(), st.integers(1, 3), st.sampled_from([2, 4]))
@settings(max_examples=20, deadline=None)
def test_each_unit_is_updated_once_a_step_and_its_gradient_is_free_from_then_on(
    stage, overlap, batches, ranks
):
    step = captured_step(make_run(num_micro_batches=batches))
    late, early = (play(step, stage, early=e, overlap=overlap, ranks=ranks) for e in (False, True))

    units = order_of(early)
    assert sorted(units) == sorted(unit.name for unit in step.units)
    held = {m.position: m.by_category_bytes["gradient"] for m in early.moments}
    before = {m.position: m.by_category_bytes["gradient"] for m in late.moments}
    assert held["optimizer step"] == 0
    assert before["optimizer step"] == sum(shards(step, ranks).values())
    at_first = 0 if batches == 1 else sum(shards(step, ranks).values())
    own = shards(step, ranks)
    last = {
        one.unit: one.last_gradient_bytes for one in step.segments if one.phase == "backward" and one.unit
    }
    assert batches > 1 or any(last.values())
    for number, name in enumerate(units):
        moment = next(m for m in early.moments if m.position == f"update of {name}")
        gone = sum(own[other] for other in units[:number])
        # Its own shard, those that earlier micro-batches have left of the others, with overlap the buffer that is being
        # reduced meanwhile and what arrives of it, unless that is added to a shard, and the gradient in whose addition all
        # this is done; none at the backward's end.
        rest = max(at_first - gone, own[name])
        reduced = own[units[number + 1]] if overlap and number + 1 < len(units) else 0
        buffer = ranks * reduced + (reduced if batches == 1 else 0)
        within = units[number + overlap : number + overlap + 1]
        assert moment.by_category_bytes["gradient"] == rest + buffer + sum(last[unit] for unit in within)


@given(st.sampled_from([2, 3]), st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_it_is_the_same_work_and_never_takes_more_memory_between_backward_and_forward(stage, batches):
    step = captured_step(make_run(num_micro_batches=batches))
    late, early = (play(step, stage, early=e) for e in (False, True))

    assert early.step_time_s == pytest.approx(late.step_time_s)
    last = [result.moments[-1].total_bytes for result in (early, late)]
    assert last[0] < last[1]
    forward = [result.moments[0].total_bytes for result in (early, late)]
    assert forward[1] - forward[0] == sum(shards(step).values())


@pytest.mark.parametrize("stage", [2, 3])
def test_updates_cover_reductions_that_overlap(stage):
    """On a slow link what a unit's update takes is taken off the wait for the next reduction."""
    step = captured_step(make_run())
    slow = replace(TIMES, alpha_s=0.0, beta_bytes_per_s=1e6)
    late, early = (play(step, stage, early=e, overlap=True, times=slow) for e in (False, True))

    assert early.step_time_s < late.step_time_s
    assert early.exposed_communication_s < late.exposed_communication_s
    plain, free = (play(step, stage, early=e, overlap=True, times=FREE) for e in (False, True))
    assert free.step_time_s == pytest.approx(plain.step_time_s)


def test_an_update_allocates_as_much_beside_its_gradient_as_its_largest_piece_needs():
    run = make_run()
    step = captured_step(run)
    position = next(n for n, segment in enumerate(step.segments) if segment.phase == "optimizer")
    segment = step.segments[position]
    level = segment.passing_gradients
    more = {**level.peak, "temporary": level.peak.get("temporary", 0) + 10_000}
    segments = list(step.segments)
    segments[position] = replace(segment, passing_gradients=replace(level, peak=more))
    heavy = replace(step, segments=tuple(segments))
    sizes = {u.name: [p.num_elements for p in step.states[u.name].parameters] for u in step.units}
    largest = max(max(each) for each in sizes.values())
    light, early = (play(each, 3, early=True) for each in (step, heavy))

    for before, after in zip(light.moments, early.moments, strict=True):
        grown = after.total_bytes - before.total_bytes
        if not after.position.startswith("update of"):
            assert grown <= 1
            continue
        own = sizes[after.position.removeprefix("update of ")]
        piece = min(max(own), -(-sum(own) // 2))
        assert grown == pytest.approx(10_000 * piece / largest, abs=1)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_allocated_in_order_is_at_its_fullest_what_the_simulator_says_is_alive(stage, overlap):
    """The first step is seen through with all updates at its end; by then there is no optimizer state yet."""
    step = captured_step(make_run())
    plan = make_plan(2, stage, overlap=overlap, gather_depth=int(overlap), update_in_backward=True)
    schedule = write_schedule(plan, step.units)
    changes = planned_sequence(step, schedule, TIMES)

    assert exact_peak(changes) == simulate(step, schedule, TIMES).peak.total_bytes
