"""Laws of the simulator: an unchanged replay is the measurement, and what sharding and recomputing must do."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.flats import flat_bytes
from memadvisor.cost.owners import Cost, share_out
from memadvisor.cost.simulate import simulate
from memadvisor.plan import Plan, UnitPlan
from memadvisor.precision import FULL_PRECISION
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.make_run import make_run

TIMES = CollectiveTimes(kind="fitted", source="a test", curves={}, alpha_s=1e-4, beta_bytes_per_s=1e9)
STATES = ("parameter", "gradient", "optimizer_state")


def plan(
    *,
    ranks=1,
    stage=0,
    recompute=(),
    overlap=False,
    depth=0,
    units=(),
    precision=FULL_PRECISION,
    shard=None,
    reduce_depth=1,
):
    return Plan(
        num_ranks=ranks,
        zero_stage=stage,
        units=units or tuple(UnitPlan(name=name, zero_stage=stage, recompute=True) for name in recompute),
        overlap=overlap,
        gather_depth=depth,
        reduce_depth=reduce_depth,
        precision=precision,
        shard_ranks=shard,
    )


def play(step, **changes):
    return simulate(step, write_schedule(plan(**changes), step.units), TIMES)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_replaying_a_single_process_unchanged_gives_its_measured_peak_and_time(blocks, batches, unexplained):
    run = make_run(num_ranks=1, num_blocks=blocks, num_micro_batches=batches, unexplained_bytes=unexplained)
    step = captured_step(run)
    result = play(step)

    assert result.peak.total_bytes == run.ranks[0].traced_step.peak_allocated_bytes
    assert result.step_time_s == pytest.approx(step.step_time_s)
    assert result.exposed_communication_s == 0


@given(st.integers(2, 8), st.integers(1, 2))
@settings(max_examples=20, deadline=None)
def test_each_stage_holds_no_more_states_than_the_one_before(ranks, batches):
    step = captured_step(make_run(num_micro_batches=batches))
    peaks = []
    for stage in range(4):
        last = play(step, ranks=ranks, stage=stage).moments[-1].by_category_bytes
        peaks.append(sum(last[category] for category in STATES))

    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize("stage", range(4))
def test_components_sum_to_the_step_and_each_is_scaled_by_its_factor(stage):
    """Waiting and computing at different paces: twice the compute and half the optimizer."""
    step = captured_step(make_run())
    again = {"ranks": 2, "stage": stage, "recompute": ("blocks.1",), "overlap": stage > 0}
    plain = play(step, **again)
    taught = play(replace(step, time_factors={"compute": 2.0, "optimizer": 0.5}), **again)

    assert plain.step_time_s == pytest.approx(sum(plain.components_s.values()))
    assert plain.components_s["recomputation"] > 0
    difference_s = plain.components_s["compute"] - plain.components_s["optimizer"] / 2
    assert taught.step_time_s == pytest.approx(plain.step_time_s + difference_s)


@pytest.mark.parametrize("stage", range(4))
def test_a_micro_batch_that_is_split_finds_the_gradients_of_its_first_half(stage):
    """In the forward of its second half, as in that of a second micro-batch that was recorded."""
    split = captured_step(make_run(num_micro_batches=1), micro_batch_divisor=2)
    two = captured_step(make_run(num_micro_batches=2))

    def gradients(step):
        moments = play(step, ranks=2, stage=stage).moments
        found = [
            m.by_category_bytes.get("gradient", 0) for m in moments if m.position == "forward of blocks.0"
        ]
        return found[-1]

    assert gradients(split) == gradients(two) > 0


def test_states_at_the_optimizer_step_are_the_formulas_of_zero():
    """fp32 Adam: 16P, 8P + 8P/n, 4P + 12P/n, 16P/n, and 4 bytes of counter for each of 14 tensors; in stage 3 an element
    that stands for each, too."""
    step = captured_step(make_run())
    num_parameters = sum(unit.num_parameters for unit in step.units)
    n = 4
    expected = {0: 16.0, 1: 8 + 8 / n, 2: 4 + 12 / n, 3: 16 / n}
    for stage, bytes_each in expected.items():
        moments = play(step, ranks=n, stage=stage).moments
        level = next(m for m in moments if m.position == "optimizer step").by_category_bytes
        held = sum(level[category] for category in STATES)

        assert held == bytes_each * num_parameters + 4 * 14 * (2 if stage == 3 else 1)


def test_an_owner_of_whole_parameters_holds_their_state_and_is_sent_their_gradients_and_values():
    """The rank with most: with LAMB 8E of state for its E elements and a counter each, 4E more a tensor sent."""
    run = make_run()
    (rank, *_) = run.ranks
    states = tuple(replace(state, optimizer="mine.Lamb") for state in rank.optimizer_states)
    step = captured_step(replace(run, ranks=(replace(rank, optimizer_states=states),)))
    sizes = [parameter.num_elements for parameter in rank.parameters]
    n, whole = 4, sum(sizes)
    owners = share_out([Cost(4 * size, size) for size in sizes], n)
    owned = [[size for size, owner in zip(sizes, owners, strict=True) if owner == r] for r in range(n)]
    most = max(sum(mine) for mine in owned)
    num_tensors = next(len(mine) for mine in owned if sum(mine) == most)
    expected = {
        0: 16 * whole + 4 * len(sizes),
        1: 8 * whole + 8 * most + 4 * num_tensors,
        2: 4 * whole + 4 * whole / n + (8 + 4) * most + 4 * num_tensors,
        3: 2 * 4 * whole / n + (8 + 4 + 4) * most + 4 * num_tensors + 4 * len(sizes),  # what stands for each
    }
    assert whole / n < most < 0.6 * whole
    for stage, held in expected.items():
        result = play(step, ranks=n, stage=stage)
        level = next(m for m in result.moments if m.position == "optimizer step").by_category_bytes
        assert sum(level[category] for category in STATES) == held
        # Between the steps there is the state alone.
        forward = result.moments[0].by_category_bytes
        assert forward["optimizer_state"] == level["optimizer_state"]


def test_padding_rounds_each_units_flat_up_to_the_ranks():
    step = captured_step(make_run(hidden=3, vocabulary=5))
    for states in step.states.values():
        elements = sum(parameter.num_elements for parameter in states.parameters)
        for ranks in (2, 4, 7):
            assert flat_bytes(states, ranks, frozen=True) == 4 * ranks * -(-elements // ranks)


@given(st.sets(st.sampled_from(["embedding", "blocks.0", "blocks.1", "blocks.2", "head"])), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_recomputing_adds_exactly_the_forwards_of_its_units(units, stage):
    step = captured_step(make_run(num_micro_batches=2))
    ranks = 2 if stage else 1
    plain, recomputed = (
        play(step, ranks=ranks, stage=stage),
        play(step, ranks=ranks, stage=stage, recompute=units),
    )
    added_s = sum(step.recomputable.get(unit, 0.0) for unit in units)

    assert recomputed.step_time_s == pytest.approx(plain.step_time_s + added_s)


def test_recomputing_a_block_frees_what_it_keeps_but_one_generator_state():
    """At the head's backward, the peak of the activations, a block's 9 x 64 values a token are gone."""
    step = captured_step(make_run(num_ranks=1))
    kept, freed = play(step), play(step, recompute=("blocks.0",))

    def at_head(result):
        return next(m.total_bytes for m in result.moments if m.position == "backward of head")

    assert at_head(kept) - at_head(freed) == 4 * 32 * 9 * 64 * 4 - 5056


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.sets(st.sampled_from(["blocks.0", "blocks.1", "blocks.2"])),
    st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_lanes_never_overlap_within_themselves_and_waiting_is_in_the_step(ranks, stage, units, batches):
    step = captured_step(make_run(num_micro_batches=batches))
    result = play(step, ranks=ranks, stage=stage, recompute=units)
    for lane in Lane:
        own = [interval for interval in result.lanes.intervals if interval.lane is lane]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(own))
    busy_s = sum(i.end_s - i.start_s for i in result.lanes.intervals if i.lane is Lane.COMPUTE)

    assert result.step_time_s == pytest.approx(busy_s + result.exposed_communication_s)
    assert result.prediction().peak_bytes == sum(result.prediction().by_category_bytes.values())


def busy_s(result, lane):
    return sum(i.end_s - i.start_s for i in result.lanes.intervals if i.lane is lane)


def test_traffic_counts_passes_over_the_parameters():
    """Passes of (n-1)/n of all bytes: an all_reduce is two; our stage 1 also gathers the parameters again;
    stage 2 scatters and gathers; stage 3 gathers twice and scatters once.
    """
    step = captured_step(make_run())
    free = CollectiveTimes(kind="fitted", source="", curves={}, alpha_s=0.0, beta_bytes_per_s=1e9)
    pass_s = sum(unit.parameter_bytes for unit in step.units) / 2 / 1e9
    for stage, passes in {0: 2, 1: 3, 2: 2, 3: 3}.items():
        schedule = write_schedule(plan(ranks=2, stage=stage), step.units)
        result = simulate(step, schedule, free)

        assert busy_s(result, Lane.COLLECTIVE) == pytest.approx(passes * pass_s)


def test_what_is_sharded_is_exposed_and_what_stays_whole_hides_under_the_backward():
    step = captured_step(make_run())
    exposed = {}
    for stage in range(4):
        result = simulate(step, write_schedule(plan(ranks=2, stage=stage), step.units), TIMES)
        exposed[stage] = result.exposed_communication_s / busy_s(result, Lane.COLLECTIVE)

    assert exposed[0] < exposed[1] < 1  # stage 1 gathers the updated parameters after the step
    assert exposed[2] == pytest.approx(1) and exposed[3] == pytest.approx(1)


@given(st.floats(1e6, 1e12), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_an_overlapped_reduction_ends_no_later_than_the_backward_plus_all_reductions(rate, batches):
    """The wait is at least what comes after the last gradient, and at most all of the traffic."""
    step = captured_step(make_run(num_micro_batches=batches))
    times = CollectiveTimes(kind="fitted", source="", curves={}, alpha_s=0.0, beta_bytes_per_s=rate)
    schedule = write_schedule(plan(ranks=2, stage=0), step.units)
    result = simulate(step, schedule, times)
    ends = [i for i in result.lanes.intervals if i.lane is Lane.COLLECTIVE]
    last_s = ends[-1].end_s - ends[-1].start_s

    assert last_s - 1e-9 <= result.exposed_communication_s <= busy_s(result, Lane.COLLECTIVE) + 1e-9


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.sets(st.sampled_from(["blocks.0", "blocks.1", "blocks.2"])),
    st.integers(1, 2),
)
@settings(max_examples=30, deadline=None)
def test_overlap_takes_no_time_away_but_waiting_and_pays_in_memory(ranks, stage, units, batches):
    step = captured_step(make_run(num_micro_batches=batches))
    waits, overlaps = (
        play(step, ranks=ranks, stage=stage, recompute=units, overlap=o, depth=int(o)) for o in (False, True)
    )

    assert busy_s(overlaps, Lane.COMPUTE) == pytest.approx(busy_s(waits, Lane.COMPUTE))
    assert busy_s(overlaps, Lane.COLLECTIVE) == pytest.approx(busy_s(waits, Lane.COLLECTIVE))
    assert overlaps.exposed_communication_s < waits.exposed_communication_s
    assert overlaps.peak.total_bytes >= waits.peak.total_bytes
    assert overlaps.moments[-1].by_category_bytes == waits.moments[-1].by_category_bytes


@pytest.mark.parametrize("rate", [1e3, 1e9])
def test_what_stage_1_has_updated_comes_in_under_the_next_steps_forward(rate):
    """The gathers begin with the step, since the one before has left them; a unit's forward waits for its own."""
    step = captured_step(make_run())
    times = CollectiveTimes(kind="fitted", source="", curves={}, alpha_s=0.0, beta_bytes_per_s=rate)
    result = simulate(step, write_schedule(plan(ranks=2, stage=1, overlap=True), step.units), times)
    waits = simulate(step, write_schedule(plan(ranks=2, stage=1), step.units), times)
    there_s = dict[str, float]()
    for unit in step.units:
        there_s[unit.name] = max(there_s.values(), default=0.0) + flat_bytes(
            step.states[unit.name], 2, frozen=False
        ) / (2 * rate)
    starts_s = {i.label: i.start_s for i in result.lanes.intervals if i.label.startswith("forward of")}
    undelayed_s = {i.label: i.start_s for i in waits.lanes.intervals if i.label.startswith("forward of")}

    delay_s = 0.0
    for name, end_s in there_s.items():
        label = f"forward of {name or 'the model itself'}"
        if label in starts_s:
            delay_s = max(delay_s, end_s - undelayed_s[label])
            assert starts_s[label] == pytest.approx(undelayed_s[label] + delay_s)
    assert {m.total_bytes for m in result.moments} == {m.total_bytes for m in waits.moments}


def test_a_block_in_flight_behind_costs_its_gradient_and_the_others_shares_of_it():
    """Stage 2, in the backward of blocks.0: the gradient of blocks.1 is still whole, and half of it arrives, which becomes
    this rank's shard."""
    step = captured_step(make_run())
    block_bytes = flat_bytes(step.states["blocks.1"], 2, frozen=False)
    there = [
        next(
            m for m in play(step, ranks=2, stage=2, overlap=o).moments if m.position == "backward of blocks.0"
        )
        for o in (False, True)
    ]
    gradient, staging = (
        there[1].by_category_bytes[c] - there[0].by_category_bytes.get(c, 0)
        for c in ("gradient", "communication")
    )

    assert (gradient, staging) == (block_bytes, 0)


@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 2), st.integers(2, 9))
@settings(max_examples=30, deadline=None)
def test_more_reductions_under_way_wait_less_and_hold_more(ranks, stage, batches, depth):
    step = captured_step(make_run(num_blocks=4, num_micro_batches=batches))
    one, more = (
        play(step, ranks=ranks, stage=stage, overlap=True, depth=1, reduce_depth=d) for d in (1, depth)
    )

    assert more.exposed_communication_s <= one.exposed_communication_s + 1e-12
    assert busy_s(more, Lane.COLLECTIVE) == pytest.approx(busy_s(one, Lane.COLLECTIVE))
    assert more.peak.total_bytes >= one.peak.total_bytes
    assert more.sent_bytes == one.sent_bytes
    assert more.moments[-1].by_category_bytes == one.moments[-1].by_category_bytes


def test_each_further_reduction_under_way_costs_a_blocks_gradient_and_the_others_shares_of_it():
    """Stage 2, in the backward of blocks.0, of four blocks: those of as many before it are whole still, and half of each
    arrives."""
    step = captured_step(make_run(num_blocks=4))
    block_bytes = flat_bytes(step.states["blocks.1"], 2, frozen=False)
    there = [
        next(m for m in played.moments if m.position == "backward of blocks.0").by_category_bytes
        for depth in (1, 2, 3)
        for played in [play(step, ranks=2, stage=2, overlap=True, reduce_depth=depth)]
    ]

    for fewer, more in pairwise(there):
        assert more["gradient"] - fewer["gradient"] == block_bytes
        assert more["communication"] == fewer["communication"] == 0


def test_what_waits_for_a_slow_link_goes_on_where_more_reductions_may_be_under_way():
    """Of a step whose backwards take as long as their reductions on average, and not each: a longer backward covers what
    shorter ones have left."""
    step = captured_step(make_run(num_blocks=4))
    place = next(n for n, s in enumerate(step.segments) if s.phase == "backward" and s.unit == "blocks.1")
    segments = list(step.segments)
    reduce_s = flat_bytes(step.states["blocks.1"], 2, frozen=False) / 2 / 1e6
    segments[place] = replace(segments[place], duration_s=3 * reduce_s)
    step = replace(step, segments=tuple(segments))
    times = CollectiveTimes(kind="fitted", source="", curves={}, alpha_s=0.0, beta_bytes_per_s=1e6)
    waits_s = [
        simulate(
            step, write_schedule(plan(ranks=2, stage=2, overlap=True, reduce_depth=d), step.units), times
        ).exposed_communication_s
        for d in (1, 2, 3)
    ]

    assert waits_s[0] > waits_s[1] > waits_s[2]


def test_buckets_of_the_recorded_ddp_are_gone_under_our_engine():
    step = captured_step(make_run())
    assert Counter(step.segments[0].captured.start)["communication"] > 0
    for stage in (0, 1):
        result = play(step, ranks=2, stage=stage)
        assert all(m.by_category_bytes.get("communication", 0) == 0 for m in result.moments)


STAGES = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=5, max_size=5)
NAMES = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")


def mixture(chosen):
    return tuple(
        UnitPlan(name=name, zero_stage=stage, recompute=again and name != "embedding", reshard=reshard)
        for name, (stage, again, reshard) in zip(NAMES, chosen, strict=True)
    )


def states(result, position):
    level = next(m for m in result.moments if m.position == position).by_category_bytes
    return sum(level[category] for category in STATES)


@given(STAGES, st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_a_mixture_holds_for_each_unit_what_its_own_stage_does(chosen, ranks):
    """At the optimizer step: the sum over units of what each saves by its stage when it alone is sharded."""
    step = captured_step(make_run())
    whole = states(play(step, ranks=ranks), "optimizer step")
    alone = 0
    for unit in mixture(chosen):
        alone += whole - states(play(step, ranks=ranks, units=(unit,)), "optimizer step")

    assert states(play(step, ranks=ranks, units=mixture(chosen)), "optimizer step") == whole - alone


@given(STAGES, st.integers(0, 4), st.booleans(), st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_keeping_parameters_until_the_backward_saves_gathers_and_no_memory(chosen, depth, overlap, batches):
    step = captured_step(make_run(num_micro_batches=batches))
    kept = [(stage, again, False) for stage, again, _ in chosen]
    options = {"ranks": 2, "overlap": overlap, "depth": depth}
    sharded, staying = (play(step, units=mixture(c), **options) for c in (chosen, kept))
    resharded = sum(stage == 3 and reshard for stage, _, reshard in chosen)

    gathers = [sum(i.label.startswith("gather") for i in r.lanes.intervals) for r in (sharded, staying)]
    assert gathers[0] - gathers[1] == resharded * batches
    assert staying.peak.total_bytes >= sharded.peak.total_bytes
    assert staying.moments[-1].by_category_bytes == sharded.moments[-1].by_category_bytes


@given(st.integers(0, 3), st.integers(1, 2))
@settings(max_examples=10, deadline=None)
def test_each_unit_of_depth_is_one_more_set_of_parameters_in_the_last_blocks_backward(depth, batches):
    """Blocks are equal, and before blocks.2 in the backward there are two blocks and the embedding."""
    step = captured_step(make_run(num_micro_batches=batches))
    sizes = [flat_bytes(step.states[name], 2, frozen=True) for name in ("blocks.1", "blocks.0", "embedding")]
    levels = [
        next(m for m in play(step, ranks=2, stage=3, depth=d).moments if m.position == "backward of blocks.2")
        for d in (0, depth)
    ]

    assert levels[1].total_bytes - levels[0].total_bytes == sum(sizes[:depth])


@given(STAGES, st.integers(2, 4), st.integers(2, 4), st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_groups_of_ranks_that_share_hold_what_as_many_ranks_alone_would(chosen, shard, groups, depth):
    """Hybrid sharding: bytes are those of one group, in every moment; the sum across groups needs none."""
    step = captured_step(make_run(num_micro_batches=2))
    units = mixture(chosen)
    options = {"units": units, "overlap": depth > 0, "depth": depth}
    alone = play(step, ranks=shard, **options).moments
    hybrid = play(step, ranks=shard * groups, shard=shard, **options).moments

    assert max(m.total_bytes for m in hybrid) == max(m.total_bytes for m in alone)
    assert hybrid[-1].by_category_bytes == alone[-1].by_category_bytes


def test_traffic_of_groups_is_passes_inside_and_a_sum_of_shards_across():
    """A pass inside is (s-1)/s of all bytes; across goes twice (g-1)/g of one s-th; stage 1 sums over all ranks."""
    step = captured_step(make_run())
    free = CollectiveTimes(kind="fitted", source="", curves={}, alpha_s=0.0, beta_bytes_per_s=1e9)
    all_s = sum(unit.parameter_bytes for unit in step.units) / 1e9
    shard, groups = 4, 2
    inside_s, across_s = all_s * (shard - 1) / shard, 2 * all_s / shard * (groups - 1) / groups
    expected = {1: 2 * all_s * 7 / 8 + inside_s, 2: 2 * inside_s + across_s, 3: 3 * inside_s + across_s}
    for stage, seconds in expected.items():
        result = simulate(step, write_schedule(plan(ranks=8, shard=4, stage=stage), step.units), free)

        assert busy_s(result, Lane.COLLECTIVE) == pytest.approx(seconds)
