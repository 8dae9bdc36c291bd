"""Flats in another precision: what is as narrow or as wide as it says, and what is not."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.compression import Compression
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.engine_units import EngineUnits
from memadvisor.cost.flats import flat_bytes
from memadvisor.cost.simulate import simulate
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import busy_s, plan, play, states
from tests.engines.trainings import loose_from
from tests.make_run import make_run

BF16 = Precision(param_dtype="bfloat16", reduce_dtype="bfloat16")


@given(st.integers(2, 5), st.integers(1, 2), st.booleans(), st.sampled_from(["bfloat16", "float16"]))
@settings(max_examples=15, deadline=None)
def test_a_narrow_reduction_changes_buffers_alone(ranks, batches, overlap, dtype):
    """Stage 2: never more memory but where a gradient was its unit's whole buffer, and has to be cast into one."""
    run = make_run(num_micro_batches=batches)
    precision = Precision(reduce_dtype=dtype)
    wide, narrow = (
        play(captured_step(run, precision=p), ranks=ranks, stage=2, overlap=overlap, precision=p)
        for p in (FULL_PRECISION, precision)
    )
    pairs = list(zip(wide.moments, narrow.moments, strict=True))

    assert all(a.position == b.position for a, b in pairs)
    cast = ("backward of embedding", "backward of head")
    assert all(b.total_bytes <= a.total_bytes for a, b in pairs if a.position not in cast)
    assert states(narrow, "optimizer step") == states(wide, "optimizer step")
    for a, b in pairs:
        assert {c: n for c, n in a.by_category_bytes.items() if c not in ("gradient", "communication")} == {
            c: n for c, n in b.by_category_bytes.items() if c not in ("gradient", "communication")
        }


def test_a_gathered_unit_and_what_the_model_makes_are_half_and_masters_are_whole():
    """Stage 3 in the backward of blocks.2, its parameters and those of one unit ahead there; by hand."""
    run = make_run()
    there, stand_ins = [], []
    for precision in (FULL_PRECISION, BF16):
        step = captured_step(run, precision=precision)
        result = play(step, ranks=2, stage=3, depth=1, precision=precision)
        there.append(next(m for m in result.moments if m.position == "backward of blocks.2"))
        resting = next(m for m in result.moments if m.position == "optimizer step").by_category_bytes
        states = step.states.values()
        stand_ins.append(sum(unit.stand_in_bytes("cpu", precision.param_dtype) for unit in states))
        shards_bytes = sum(unit.parameter_bytes for unit in step.units) // 2
        assert resting["parameter"] == shards_bytes + stand_ins[-1]
    block_bytes = flat_bytes(step.states["blocks.2"], 2, frozen=True)
    wide, narrow = (moment.by_category_bytes for moment in there)

    assert stand_ins[0] == 2 * stand_ins[1] > 0
    assert wide["parameter"] - narrow["parameter"] == 2 * block_bytes // 2 + stand_ins[1]
    assert narrow["activation"] == wide["activation"] // 2


def test_messages_are_as_large_as_their_dtypes_say():
    """Two gathers in bfloat16 and a reduction in float16: half of what stage 3 moves in float32."""
    run = make_run()
    free = CollectiveTimes(kind="fitted", source="", curves={}, alpha_s=0.0, beta_bytes_per_s=1e9)
    moved = []
    for precision in (FULL_PRECISION, Precision(param_dtype="bfloat16", reduce_dtype="float16")):
        step = captured_step(run, precision=precision)
        schedule = write_schedule(plan(ranks=2, stage=3, precision=precision), step.units)
        moved.append(busy_s(simulate(step, schedule, free), Lane.COLLECTIVE))

    assert moved[1] == pytest.approx(moved[0] / 2)


def test_a_gradient_becomes_its_units_buffer_only_where_it_is_of_its_dtype():
    """The head's one gradient, and beside it the buffer that it is cast into."""
    run = make_run(sequence=2)  # so that weights outweigh activations
    levels = {}
    for param, summed in ((None, None), (None, "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", None)):
        step = captured_step(run, precision=Precision(param_dtype=param, reduce_dtype=summed))
        head = next(s for s in step.segments if (s.phase, s.unit) == ("backward", "head"))
        levels[param, summed] = head.collected_gradients.peak["gradient"]
    whole = step.states["head"].parameter_bytes

    assert list(levels.values()) == [whole, whole + whole // 2, whole // 2, whole // 2 + whole]


def test_large_gradients_stay_where_they_are_made_between_ranks_of_a_cpu():
    """By hand: no buffer beside the gradient that is copied into it, no padding, and small ones are collected."""
    run = make_run(sequence=2)
    reductions, levels = {}, {}
    for loose_bytes in (10**6, 1, 20_000):  # none is as large, all are, all but one are
        with loose_from(loose_bytes):
            step = captured_step(run)
            result = play(step, ranks=5, stage=2)
        block = next(s for s in step.segments if (s.phase, s.unit) == ("backward", "blocks.1"))
        levels[loose_bytes] = block.collected_gradients.peak, block.loose_gradients.peak
        moment = next(m for m in result.moments if m.position == "reduce of blocks.1")
        reductions[loose_bytes] = moment.by_category_bytes["gradient"]
    sizes = [p.size_bytes for p in step.states["blocks.1"].parameters]
    flat = flat_bytes(step.states["blocks.1"], 5, frozen=False)

    assert min(sizes) < 20_000 < max(sizes) and flat > sum(sizes)
    assert levels[10**6][0] == levels[10**6][1]
    assert levels[1][1]["gradient"] == sum(sizes)
    assert levels[20_000][1]["gradient"] == sum(sizes) + min(sizes)  # which is copied
    assert levels[1][0]["gradient"] > sum(sizes)
    padding, last = flat - sum(sizes), block.last_gradient_bytes
    assert reductions[10**6] - reductions[1] == padding + last
    assert reductions[10**6] - reductions[20_000] == padding + last * (last >= 20_000)


@pytest.mark.parametrize("why", ["sums in bfloat16", "8 bits", "a GPU", "stage 1"])
def test_where_they_do_not_stay_a_flat_buffer_is_there(why):
    precision = Precision(reduce_dtype="bfloat16") if why == "sums in bfloat16" else FULL_PRECISION
    options = {"compression": Compression(reduce_bits=8)} if why == "8 bits" else {}
    units = {}
    for loose_bytes in (10**6, 1):
        with loose_from(loose_bytes):
            step = captured_step(make_run(), precision=precision)
            step = dataclasses.replace(step, device="cuda") if why == "a GPU" else step
            stage = 1 if why == "stage 1" else 2
            chosen = dataclasses.replace(plan(ranks=2, stage=stage, precision=precision), **options)
            schedule = write_schedule(chosen, step.units)
            units[loose_bytes] = EngineUnits(step, schedule)

    assert units[1].loose == {}
    assert units[1].own_gradient_bytes == units[10**6].own_gradient_bytes


def in_bfloat16(run):
    """The same training of a model whose parameters, gradients and states are bfloat16."""
    rank = run.ranks[0]
    parameters = tuple(
        dataclasses.replace(row, dtype="bfloat16", size_bytes=row.size_bytes // 2) for row in rank.parameters
    )
    storages = tuple(
        dataclasses.replace(row, dtype="bfloat16", size_bytes=row.size_bytes // 2)
        if row.category in ("parameter", "gradient", "optimizer_state") and row.size_bytes > 4
        else row
        for row in rank.storages
    )
    return dataclasses.replace(
        run, ranks=(dataclasses.replace(rank, parameters=parameters, storages=storages),)
    )


def test_masters_are_twice_as_wide_in_shards_and_states_and_nowhere_else():
    """Stage 3 of a model in bfloat16, by hand: float32 shards of values, gradients and moments, narrow gathers."""
    run = in_bfloat16(make_run(num_ranks=1))
    levels = []
    for precision in (FULL_PRECISION, Precision(optimizer_dtype="float32")):
        step = captured_step(run, precision=precision)
        result = play(step, ranks=2, stage=3, precision=precision)
        for place in ("optimizer step", "backward of blocks.2"):
            levels.append(next(m for m in result.moments if m.position == place).by_category_bytes)
    (resting, running), (wide_resting, wide_running) = levels[:2], levels[2:]
    shard_bytes = sum(states.parameter_bytes for states in step.states.values()) // 2
    scalar_bytes = sum(states.optimizer_scalar_bytes for states in step.states.values())
    stand_in_bytes = sum(states.stand_in_bytes("cpu", None) for states in step.states.values())

    assert resting["parameter"] - stand_in_bytes == resting["gradient"] == shard_bytes
    assert wide_resting["parameter"] - stand_in_bytes == wide_resting["gradient"] == 2 * shard_bytes
    assert (
        wide_resting["optimizer_state"] - scalar_bytes == 2 * (resting["optimizer_state"] - scalar_bytes) > 0
    )
    assert wide_running["parameter"] - running["parameter"] == shard_bytes


@pytest.mark.parametrize("stage", [1, 2])
def test_masters_beside_whole_parameters_are_twice_a_narrow_shard(stage):
    """By hand: narrow parameters as they are, moments twice as wide and the masters with them; while the optimizer
    steps, gradients in float32, with stage 1 those of one unit beside the narrow ones."""
    run = in_bfloat16(make_run(num_ranks=1))
    levels = []
    for precision in (FULL_PRECISION, Precision(optimizer_dtype="float32")):
        step = captured_step(run, precision=precision)
        result = play(step, ranks=2, stage=stage, precision=precision)
        levels.append(next(m for m in result.moments if m.position == "optimizer step").by_category_bytes)
    narrow, wide = levels
    shard_bytes = sum(states.parameter_bytes for states in step.states.values()) // 2
    scalar_bytes = sum(states.optimizer_scalar_bytes for states in step.states.values())
    moment_bytes = narrow["optimizer_state"] - scalar_bytes
    largest_bytes = max(states.parameter_bytes for states in step.states.values())

    assert wide["parameter"] == narrow["parameter"] == 2 * shard_bytes
    assert wide["optimizer_state"] - scalar_bytes == 2 * moment_bytes + 2 * shard_bytes
    assert (narrow["gradient"], wide["gradient"]) == (
        (2 * shard_bytes, 2 * shard_bytes + largest_bytes) if stage == 1 else (shard_bytes, 2 * shard_bytes)
    )
