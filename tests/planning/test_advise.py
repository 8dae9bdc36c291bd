"""Advice: ranked plans whose predictions the simulator gave, and laws that any budget obeys."""

import dataclasses
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.compression import Compression
from memadvisor.cost.allocator_settings import MIB
from memadvisor.cost.collectives import times_from_curves
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import CollectiveCurve, Hardware, TierBandwidth
from memadvisor.hardware.load import named_hardware
from memadvisor.plan import UnitPlan, fingerprint
from memadvisor.plan_file import plan_from_json, plan_to_json
from memadvisor.planning.advise import advise
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.lossy import lossy_alternatives, with_coded_states
from memadvisor.planning.plays import Plays
from memadvisor.planning.reasons import explain
from memadvisor.planning.search import Search
from memadvisor.planning.updates import one_after_another
from memadvisor.run.records import Module
from tests.make_run import make_run

RUN = make_run(num_blocks=2)
MEASURED = Hardware(
    name="links",
    kind="measured",
    source="a test",
    memory_bytes=None,
    memory_bandwidth_bytes_per_s=None,
    peak_flops_per_s={},
    collectives=tuple(
        CollectiveCurve(operation=name, num_ranks=2, sizes_bytes=(10**6,), durations_s=(1e-3,))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    ),
)


@given(st.lists(st.integers(10**6, 8 * 10**6), min_size=2, max_size=2))
@example([2_060_014, 2_097_151])  # 1.4 % slower
@settings(max_examples=5, deadline=None)
def test_more_memory_makes_the_best_plan_slower_by_no_more_than_a_local_search_misses(budgets):
    """5 %: a stage for each unit is searched locally (docs/planning/measured.md)."""
    small, large = (advise(RUN, memory_bytes=budget) for budget in sorted(budgets))

    if small.best is not None:
        assert large.best is not None
        fastest = [min(p.prediction.step_time_s for p in a.plans if p.fits) for a in (small, large)]
        assert fastest[1] <= fastest[0] * 1.05


@given(st.integers(10**6, 8 * 10**6))
@settings(max_examples=8, deadline=None)
def test_a_plan_fits_exactly_when_its_peak_is_within_the_budget(budget):
    advice = advise(RUN, memory_bytes=budget)

    assert all(p.fits == (p.prediction.peak_bytes <= budget) for p in advice.plans)
    assert [p.fits for p in advice.plans] == sorted((p.fits for p in advice.plans), reverse=True)
    assert (advice.best is not None) == (advice.smallest_budget_bytes <= budget)


def test_the_smallest_budget_is_one_that_fits_and_a_byte_less_is_not():
    smallest = advise(RUN, memory_bytes=1).smallest_budget_bytes

    assert advise(RUN, memory_bytes=smallest).best is not None
    assert advise(RUN, memory_bytes=smallest - 1).best is None


def test_the_smallest_budget_without_changes_is_one_that_fits_the_script_as_it_is():
    unchanged = advise(RUN, memory_bytes=1).smallest_unchanged_bytes

    def fits(memory_bytes):
        return [p for p in advise(RUN, memory_bytes=memory_bytes).plans if p.fits and not p.changes_script]

    assert fits(unchanged)
    assert not fits(unchanged - 1)


def test_seventy_percent_of_the_measured_peak_is_met_without_touching_the_script():
    peak_bytes = RUN.ranks[0].traced_step.peak_allocated_bytes
    advice = advise(RUN, memory_bytes=int(0.7 * peak_bytes))

    assert advice.measured_peak_bytes == peak_bytes
    assert not advice.plans[0].changes_script
    assert advice.plans[0].prediction.peak_bytes <= 0.7 * peak_bytes


def test_a_plan_is_for_this_model_and_survives_its_file():
    best = advise(RUN, memory_bytes=4 * 10**6).best
    parameters = [(p.name, p.shape, p.dtype) for p in RUN.ranks[0].parameters]

    assert best.fingerprint == fingerprint(parameters)
    assert [unit.name for unit in best.units] == [unit.name for unit in RUN.ranks[0].units]
    assert plan_from_json(plan_to_json(best), "it") == best


def test_one_rank_knows_no_sharding():
    advice = advise(make_run(num_ranks=1), memory_bytes=10**9)
    assert {ranked.plan.zero_stage for ranked in advice.plans} == {0}
    assert [note.split(",")[0] for note in advice.notes] == ["No plan keeps states on disk"]


@pytest.mark.parametrize(("num_ranks", "is_said"), [(64, True), (2, False)])
def test_a_model_that_is_larger_than_what_its_steps_may_hold_is_named(num_ranks, is_said):
    """Shards of 64 ranks are smaller than the whole model, which each of them has before it is sharded."""
    run = make_run(num_ranks=2, hidden=256)
    whole_bytes = sum(states.parameter_bytes for states in captured_step(run).states.values())
    advice = advise(run, memory_bytes=whole_bytes - 1, num_ranks=num_ranks)

    assert advice.plans[0].fits is is_said
    assert any("wraps its model" in note for note in advice.notes) is is_said


def test_several_ranks_need_times_of_collectives_and_a_hardware_file_gives_them():
    alone = make_run(num_ranks=1)
    with pytest.raises(UsageError, match="collectives among 4") as caught:
        advise(alone, memory_bytes=10**9, num_ranks=4)
    assert "memadvisor calibrate" in caught.value.hint

    advice = advise(alone, memory_bytes=10**9, num_ranks=4, hardware=MEASURED)
    assert {ranked.plan.num_ranks for ranked in advice.plans} == {4}
    assert any("planned for 4" in note and "micro-batch" in note for note in advice.notes)


@pytest.mark.parametrize(("has_ddp", "is_said"), [(False, True), (True, False), (None, False)])
def test_a_script_whose_parallelism_is_its_own_is_told_that_no_plan_applies(has_ddp, is_said):
    ranks = tuple(
        dataclasses.replace(rank, process=dataclasses.replace(rank.process, has_ddp=has_ddp))
        for rank in RUN.ranks
    )
    advice = advise(dataclasses.replace(RUN, ranks=ranks), memory_bytes=10**9)
    assert any("without DistributedDataParallel" in note for note in advice.notes) is is_said


def test_a_script_with_fsdp1_is_told_what_applies_to_it():
    """It was sent to `advise` without other options, which is what it had asked."""
    wrapped = Module("blocks.0", "FullyShardedDataParallel", "blocks.0")
    ranks = tuple(
        dataclasses.replace(
            rank,
            modules=(*rank.modules, wrapped),
            process=dataclasses.replace(rank.process, has_ddp=False),
        )
        for rank in RUN.ranks
    )
    notes = advise(dataclasses.replace(RUN, ranks=ranks), memory_bytes=10**9).notes
    assert sum("FSDP1" in note for note in notes) == 1
    assert not any("without DistributedDataParallel" in note for note in notes)


def test_a_script_whose_ddp_is_over_some_of_its_ranks_is_refused():
    """Split layers under DDP (torch's _pre_dp_module_transform) are plain tensors: plans took all ranks for replicas."""
    process = dataclasses.replace(RUN.ranks[0].process, has_ddp=True, ddp_ranks=1)
    ranks = (dataclasses.replace(RUN.ranks[0], process=process), *RUN.ranks[1:])
    with pytest.raises(UsageError, match="over 1 of 2 ranks"):
        advise(dataclasses.replace(RUN, ranks=ranks), memory_bytes=10**9)


def test_a_script_whose_ddp_is_around_parts_of_its_model_is_refused():
    """As a DLRM's, whose tables are each on one rank: plans shared out the tables too, and `run` found another model."""
    parts = tuple(Module(name, "DistributedDataParallel", name) for name in ("bottom", "top"))
    ranks = tuple(dataclasses.replace(rank, modules=(*rank.modules, *parts)) for rank in RUN.ranks)
    with pytest.raises(UsageError, match=r"around parts of the model \(bottom, top\)"):
        advise(dataclasses.replace(RUN, ranks=ranks), memory_bytes=10**9)


@pytest.mark.parametrize(
    ("has", "words"),
    [
        ("has_ddp_hook", "communication hook"),
        ("has_ddp_join", "torch's Join"),
        ("has_zero_optimizer", "ZeroRedundancyOptimizer"),
        ("has_replicate", "composable `replicate`"),
        ("ddp_option", "parameters that DistributedDataParallel ignores"),
    ],
)
def test_a_script_with_what_the_engine_does_not_take_over_gets_no_plan_that_run_refuses(has, words):
    """All ranks may recompute alike (test_tensor_parallel.py), and one rank has nothing of it."""
    ranks = tuple(
        dataclasses.replace(
            rank,
            process=dataclasses.replace(
                rank.process, has_ddp=True, **{has: words if has == "ddp_option" else True}
            ),
        )
        for rank in RUN.ranks
    )
    run = dataclasses.replace(RUN, ranks=ranks)
    with pytest.raises(UsageError, match=words) as caught:
        advise(run, memory_bytes=10**9)
    assert "without other options" in caught.value.hint
    assert advise(run, memory_bytes=10**9, num_ranks=1).plans


@pytest.mark.parametrize(("when", "is_local"), [("nothing", True), ("before", True), ("in it", False)])
def test_updates_that_no_average_goes_before_are_those_of_local_sgd(when, is_local):
    """accelerate's LocalSGD was told to measure collectives; a script that averages gradients by itself, under `no_sync`,
    is replicas as others are."""
    ranks = tuple(local_updates(rank, when) for rank in RUN.ranks)
    run = dataclasses.replace(RUN, ranks=ranks)
    if not is_local:
        assert advise(run, memory_bytes=10**9).plans
        return
    with pytest.raises(UsageError, match="told not to average"):
        advise(run, memory_bytes=10**9)


def local_updates(rank, when):
    begins_s = min(span.start_s for span in rank.spans if span.step == rank.traced_step.index)
    issued_s = begins_s - 0.1 if when == "before" else begins_s + 0.1
    sent = rank.collectives if when != "nothing" else ()
    return dataclasses.replace(
        rank,
        process=dataclasses.replace(rank.process, has_ddp=True, has_local_updates=True),
        collectives=tuple(dataclasses.replace(each, issue_s=issued_s) for each in sent),
    )


def test_what_torch_compile_has_made_gets_no_plan_of_stage_3():
    """`run` refuses it; nothing says when a graph needs the parameters of units inside."""
    compiled = Module("blocks.0", "OptimizedModule", "blocks.0")
    ranks = tuple(dataclasses.replace(rank, modules=(*rank.modules, compiled)) for rank in RUN.ranks)
    advice = advise(dataclasses.replace(RUN, ranks=ranks), memory_bytes=2 * 10**6)
    assert {unit.zero_stage for one in advice.plans for unit in one.plan.units} <= {0, 1, 2}
    assert any("No plan is of ZeRO stage 3" in note for note in advice.notes)
    assert 3 in {one.plan.zero_stage for one in advise(RUN, memory_bytes=2 * 10**6).plans}


def test_an_optimizer_that_no_rank_can_have_a_part_of_gets_no_plan_that_shares_it_out():
    """Prodigy's plans of ZeRO were refused by `run`, which had tried it."""
    why = "ZeRO stages 1 to 3 cannot share out Prodigy: it updates a parameter by more than its own gradient."
    ranks = tuple(
        dataclasses.replace(rank, process=dataclasses.replace(rank.process, whole_optimizer=why))
        for rank in RUN.ranks
    )
    run = dataclasses.replace(RUN, ranks=ranks)
    advice = advise(run, memory_bytes=2 * 10**6)

    assert {unit.zero_stage for one in advice.plans for unit in one.plan.units} == {0}
    assert advice.notes.count(f"{why.removesuffix('.')}: no plan is of these stages.") == 1
    assert not any("of these stages" in note for note in advise(run, memory_bytes=10**9, num_ranks=1).notes)
    with pytest.raises(UsageError, match=r"needs ZeRO stage 1, 2 or 3\. .*Prodigy"):
        advise(run, memory_bytes=10**9, compression=Compression(gather_bits=8))


def test_every_plan_says_where_its_peak_is_and_how_the_next_compares():
    plans = advise(RUN, memory_bytes=4 * 10**6).plans
    for ranked in plans:
        assert f"in the {ranked.prediction.peak_position}" in ranked.plan.why
    # One sentence went from sharding to recomputation: "ZeRO 2 on 2 ranks with reductions ... and recomputes nothing".
    assert all("recomputes" not in ranked.plan.why.split(". ", 1)[0] for ranked in plans)
    assert all("% of it is " in ranked.plan.why for ranked in plans)
    assert all("The next plan" in ranked.plan.why for ranked in plans[:-1])
    assert "The next plan" not in plans[-1].plan.why


def test_of_two_plans_that_fit_the_one_that_overlaps_is_kept():
    plans = advise(RUN, memory_bytes=10**9, hardware=MEASURED).plans

    assert {ranked.plan.zero_stage: ranked.plan.overlap for ranked in plans} == {
        0: False, 1: True, 2: True, 3: True
    }  # fmt: skip


def alike(seconds):
    """Of two ranks, whose collectives of 1 MB all take as long."""
    curves = [
        CollectiveCurve(operation=name, num_ranks=2, sizes_bytes=(10**6,), durations_s=(seconds,))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    return times_from_curves(curves, 2, "a test")


def test_more_reductions_are_under_way_where_that_is_clearly_faster():
    """One block's backward is longer than its reduction, and the others' are shorter."""
    run = make_run(num_blocks=4)
    step = captured_step(run)
    segments = tuple(
        dataclasses.replace(segment, duration_s=0.06 if segment.unit == "blocks.1" else segment.duration_s)
        for segment in step.segments
    )
    uneven = dataclasses.replace(step, segments=segments)

    def of_stage_2(step, reduce_s, budget_bytes):
        plays = Plays(run, alike(reduce_s), 2, budget_bytes)
        return next(ranked for ranked in Search(plays).plans(step) if ranked.plan.zero_stage == 2)

    deep, quick = (of_stage_2(uneven, reduce_s, 2**40) for reduce_s in (0.03, 1e-6))
    arrangement = Arrangement(deep.plan.units, 1, deep.plan.gather_depth)
    plays = Plays(run, alike(0.03), 2, 2**40)
    one = plays.play(uneven, arrangement)

    assert (deep.plan.reduce_depth, quick.plan.reduce_depth) == (2, 1)
    assert deep.prediction.step_time_s < 0.99 * one.step_time_s
    assert "educes gradients up to 2 units behind" in explain(deep.plan, deep.prediction, None, 2**40)


def test_units_are_updated_one_after_another_where_a_forward_waits_for_what_was_updated():
    """The optimizer updates one parameter after another, so that nothing but the wait is less."""
    run = make_run(num_blocks=4)
    step = dataclasses.replace(captured_step(run), may_update_by_unit=True)
    assert not step.updates_together

    def of_stage_1(gather_s):
        plays = Plays(run, alike(gather_s), 2, 2**40)
        return next(ranked for ranked in Search(plays).plans(step) if ranked.plan.zero_stage == 1)

    waits, free = of_stage_1(0.02), of_stage_1(1e-6)
    assert (waits.plan.update_by_unit, free.plan.update_by_unit) == (True, False)
    why = explain(waits.plan, waits.prediction, None, 2**40)
    assert "updates units one after another, and gathers each behind its own update" in why


def usual_and_by_unit(run, step, stages, gather_s):
    """A plan of units with these stages, in turns, and what is shown in its place where that is worth it."""
    units = tuple(
        UnitPlan(name=unit.name, zero_stage=stage, recompute=False)
        for unit, stage in zip(step.units, itertools.cycle(stages), strict=False)
    )
    arrangement, plays = Arrangement(units, 1, 1), Plays(run, alike(gather_s), 2, 2**40)
    usual = plays.ranked(step, arrangement, plays.play(step, arrangement).prediction())
    return usual, one_after_another(step, plays, usual)


@pytest.mark.parametrize(
    ("stages", "behind"),
    [
        ((3,), "what the next forward begins with behind its update"),
        ((1, 2), "each behind its own update"),
    ],
)
def test_so_are_units_of_stage_3_or_of_several_stages(stages, behind):
    run = make_run(num_blocks=4)
    step = dataclasses.replace(captured_step(run), may_update_by_unit=True)

    usual, waits = usual_and_by_unit(run, step, stages, 0.02)
    assert waits.plan.update_by_unit and waits.plan.units == usual.plan.units
    assert waits.prediction.step_time_s < 0.99 * usual.prediction.step_time_s
    assert f"one after another, and gathers {behind}" in explain(waits.plan, waits.prediction, None, 2**40)
    usual, free = usual_and_by_unit(run, step, stages, 1e-6)
    assert free is usual


def test_groups_of_ranks_share_where_memory_allows_and_collectives_are_faster_for_it():
    """Of 4 ranks, 2 move half of the bytes to gather and all of 4 three quarters; they hold twice as much."""
    curves = (
        dataclasses.replace(curve, sizes_bytes=(10**3, 10**7), durations_s=(1e-4, 1.0))
        for curve in MEASURED.collectives
    )
    slow = dataclasses.replace(MEASURED, collectives=tuple(curves))
    ample, tight = (
        advise(RUN, memory_bytes=budget, num_ranks=4, hardware=slow) for budget in (10**9, 2 * 10**6)
    )

    assert {r.plan.zero_stage: r.plan.shard_ranks for r in ample.plans if not r.plan.is_mixed} == {
        0: None, 1: 2, 2: 2, 3: 2
    }  # fmt: skip
    assert any("on 4 ranks in groups of 2" in ranked.plan.why for ranked in ample.plans)
    smallest = min(tight.plans, key=lambda ranked: ranked.prediction.peak_bytes)
    assert smallest.plan.group_ranks == 4


def run_of_four_samples(**settings):
    """One rank, all of whose activations shrink with the samples of a micro-batch."""
    run = make_run(num_ranks=1, **settings)
    rank = run.ranks[0]
    rows = tuple(
        dataclasses.replace(row, shape="[4, 9]") if row.category == "activation" else row
        for row in rank.storages
    )
    return dataclasses.replace(run, ranks=(dataclasses.replace(rank, storages=rows),))


def test_splits_of_the_micro_batch_come_after_plans_that_leave_the_script_alone():
    run = run_of_four_samples(num_blocks=4, vocabulary=64, sequence=512)
    advice = advise(run, memory_bytes=int(0.7 * run.ranks[0].traced_step.peak_allocated_bytes))
    fitting = [ranked for ranked in advice.plans if ranked.fits]

    assert [ranked.changes_script for ranked in fitting] == [False, True]
    assert [bool(ranked.plan.recomputed_units) for ranked in fitting] == [True, False]
    for ranked in fitting:
        assert ranked.plan.micro_batch_size * ranked.plan.grad_accum == 4


def test_on_cpu_nothing_is_said_of_a_reservation():
    assert {p.prediction.reserved_bytes for p in advise(RUN, memory_bytes=10**8).plans} == {None}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_on_cuda_a_plan_fits_when_its_reservation_is_within_the_budget(num_ranks):
    """Segments of 20 MiB make a reservation much larger than the peak; no plan counts as fitting by its peak."""
    run = make_run(num_ranks=num_ranks, num_blocks=4, hidden=256, device="cuda:0")
    for budget in (40 * MIB, 80 * MIB) if num_ranks == 2 else (40 * MIB, 60 * MIB, 80 * MIB, 120 * MIB):
        advice = advise(run, memory_bytes=budget)
        for ranked in advice.plans:
            prediction = ranked.prediction
            assert prediction.reserved_bytes >= prediction.peak_bytes
            assert sum(prediction.by_category_bytes.values()) == prediction.peak_bytes
            assert prediction.peak_bytes % 512 == 0  # in the allocator's blocks
            assert prediction.reserved_bytes % (2 * MIB) == 0
            assert ranked.fits == (prediction.reserved_bytes <= budget)
            assert plan_from_json(plan_to_json(ranked.plan), "it").prediction == prediction
        assert (advice.best is not None) == (advice.smallest_budget_bytes <= budget)
    assert any("reserve" in note for note in advice.notes)


def test_the_smallest_budget_on_cuda_is_one_that_fits():
    run = make_run(num_ranks=1, num_blocks=4, hidden=256, device="cuda:0")
    smallest = advise(run, memory_bytes=1).smallest_budget_bytes

    assert advise(run, memory_bytes=smallest).best is not None


def test_a_plan_for_a_gpu_from_a_cpu_run_says_what_it_rests_on():
    advice = advise(make_run(num_ranks=1), memory_bytes=10**9, hardware=named_hardware("h100"))

    assert advice.best.prediction.reserved_bytes is not None
    assert any("Recorded on a CPU" in note for note in advice.notes)


def test_a_plan_file_without_a_reservation_is_read():
    value = plan_to_json(advise(RUN, memory_bytes=4 * 10**6).best)
    del value["prediction"]["reserved_bytes"]

    assert plan_from_json(value, "an older file").prediction.reserved_bytes is None


def test_updates_in_the_backward_are_offered_where_they_are_needed_and_the_script_lets_them_be():
    """In a model of many blocks the peak is where all gradients are there."""
    run = make_run(num_blocks=8)
    alone = dataclasses.replace(captured_step(run), leaves_gradients_alone=True)
    needs = {}
    times = times_from_curves(MEASURED.collectives, 2, "a test")
    for step in (captured_step(run), alone):
        search = Search(Plays(run, times, 2, 1))
        plans = [ranked.plan for ranked in search.plans(step)]
        needs[step.leaves_gradients_alone] = (
            [(p.zero_stage, p.update_in_backward) for p in plans],
            min(search.needs),
        )

    assert not any(early for _, early in needs[False][0])
    assert needs[True][1] < needs[False][1]
    # With the budget that only they meet, they are chosen and said.
    search = Search(Plays(run, times, 2, needs[True][1]))
    fitting = [ranked for ranked in search.plans(alone) if ranked.fits]
    assert fitting and all(ranked.plan.update_in_backward for ranked in fitting)
    # Where gradients may come in any order the engine leaves updates to the optimizer step.
    ranks = tuple(
        dataclasses.replace(rank, process=dataclasses.replace(rank.process, has_ddp_any_order=True))
        for rank in run.ranks
    )
    any_order = Plays(dataclasses.replace(run, ranks=ranks), times, 2, needs[True][1])
    assert not any(ranked.plan.update_in_backward for ranked in Search(any_order).plans(alone))
    plan, prediction = fitting[0].plan, fitting[0].prediction
    assert "updates units in the backward, since" in explain(plan, prediction, None, needs[True][1])
    # With ample memory a plan without them is not given up for less than a hundredth of its time.
    late = {p.plan.zero_stage: p for p in Search(Plays(run, times, 2, 2**40)).plans(captured_step(run))}
    for ranked in Search(Plays(run, times, 2, 2**40)).plans(alone):
        if ranked.plan.update_in_backward:
            limit_s = 0.99 * late[ranked.plan.zero_stage].prediction.step_time_s
            assert ranked.prediction.step_time_s < limit_s


@pytest.mark.parametrize(("num_ranks", "share"), [(1, 0.75), (1, 0.9), (2, 0.7)])
def test_along_the_front_more_memory_always_takes_less_time(num_ranks, share):
    run = make_run(num_ranks=num_ranks, num_blocks=6, sequence=128)
    budget = int(share * run.ranks[0].traced_step.peak_allocated_bytes)
    advice = advise(run, memory_bytes=budget)
    peaks = [point.peak_bytes for point in advice.front]
    times = [point.step_time_s for point in advice.front]

    assert peaks == sorted(set(peaks)) and times == sorted(set(times), reverse=True)
    assert advice.front[-1].num_recomputed == 0 < advice.front[0].num_recomputed
    best = advice.best.prediction
    if advice.best.is_mixed:
        return
    assert (best.peak_bytes, best.step_time_s) in zip(peaks, times, strict=True)
    assert advice.next_gib_s == pytest.approx(best.step_time_s - times[-1])


def test_where_nothing_fits_a_gib_more_has_no_price():
    assert advise(RUN, memory_bytes=1).next_gib_s is None


CODER = TierBandwidth(read_bytes_per_s=2e9, write_bytes_per_s=1e9)


def test_state_in_eight_bits_is_shown_and_chosen_where_it_is_asked_for_alone():
    """Its peak and its time, which is not known where the coder is not; asked for, it is in every plan."""
    hardware = dataclasses.replace(MEASURED, coder=CODER)
    plain, known = (advise(RUN, memory_bytes=2**30, hardware=each) for each in (MEASURED, hardware))
    assert [plan.plan for plan in known.plans] == [plan.plan for plan in plain.plans]
    assert not any(plan.plan.optimizer_codes for plan in known.plans)
    (timed,), (untimed,) = known.lossy, plain.lossy
    first = next(ranked for ranked in known.plans if not ranked.changes_script).prediction
    assert untimed.step_time_s is None and untimed.peak_bytes == timed.peak_bytes < first.peak_bytes
    assert timed.step_time_s > first.step_time_s

    asked = advise(RUN, memory_bytes=2**30, hardware=hardware, optimizer_bits=8)
    assert asked.lossy == () and all(plan.plan.optimizer_codes == {8} for plan in asked.plans)
    assert "in 8 bits" in asked.best.why
    assert plan_from_json(plan_to_json(asked.best), "it") == asked.best
    assert asked.best.prediction.peak_bytes <= timed.peak_bytes
    assert any("lossy: optimizer state" in note for note in asked.notes)
    assert asked.smallest_budget_bytes < known.smallest_budget_bytes
    with pytest.raises(UsageError, match="how long coding"):
        advise(RUN, memory_bytes=2**30, hardware=MEASURED, optimizer_bits=8)


def test_optimizer_state_goes_to_disk_where_nothing_else_fits_and_the_disk_is_known():
    disk = TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    run = make_run(num_ranks=1)
    alone = advise(run, memory_bytes=1, hardware=MEASURED).plans
    smallest = min(p.prediction.peak_bytes for p in alone if not p.changes_script)
    fits, tight = (
        advise(run, memory_bytes=smallest - less, hardware=dataclasses.replace(MEASURED, disk=disk))
        for less in (0, 1)
    )

    assert fits.best.optimizer_tiers == {"device"}
    assert tight.best.optimizer_tiers == {"device", "disk"}
    assert {unit.optimizer_tier for unit in tight.best.units} == {"disk"}
    assert "keeps optimizer state on the disk" in tight.best.why
    assert any("bandwidths (a test)" in note for note in tight.notes)
    assert tight.best.prediction.exposed_transfer_s > 0
    assert plan_from_json(plan_to_json(tight.best), "it") == tight.best
    unknown = advise(run, memory_bytes=smallest - 1, hardware=MEASURED)
    assert not any(p.fits and not p.changes_script for p in unknown.plans)


@pytest.mark.parametrize(("bytes_per_s", "tiers"), [(1e6, {"device"}), (1e8, {"disk"})])
def test_of_mixed_stages_and_state_on_disk_the_faster_is_first_where_units_of_one_stage_do_not_fit(
    bytes_per_s, tiers
):
    disk = TierBandwidth(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)
    alone = [p for p in advise(RUN, memory_bytes=1, hardware=MEASURED).plans if not p.changes_script]
    alike = [p for p in alone if len({unit.zero_stage for unit in p.plan.units}) == 1]
    budget = min(p.prediction.peak_bytes for p in alike) - 1
    mixed, known = (
        next(p for p in advise(RUN, memory_bytes=budget, hardware=hardware).plans if not p.changes_script)
        for hardware in (MEASURED, dataclasses.replace(MEASURED, disk=disk))
    )

    assert mixed.fits and len({unit.zero_stage for unit in mixed.plan.units}) > 1
    assert known.fits and {unit.optimizer_tier for unit in known.plan.units} == tiers
    assert known.prediction.step_time_s <= mixed.prediction.step_time_s
    assert (known.plan.units == mixed.plan.units) == (tiers == {"device"})


def test_parameters_go_to_disk_where_optimizer_state_and_activations_alone_do_not_fit():
    disk = TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    known = dataclasses.replace(MEASURED, disk=disk)
    run = make_run(num_ranks=1, num_blocks=4, hidden=256, vocabulary=64, sequence=4, micro_batch_size=1)
    nothing = advise(run, memory_bytes=1, hardware=known)
    usual = [p for p in nothing.plans if p.plan.parameter_tiers == {"device"} and not p.changes_script]
    smallest = min(p.prediction.peak_bytes for p in usual)
    fits, tight = (advise(run, memory_bytes=smallest - less, hardware=known) for less in (0, 1))

    assert all(ranked.plan.parameter_tiers == {"device"} for ranked in fits.plans)
    away = [unit for unit in tight.best.units if unit.parameter_tier == "disk"]
    assert 0 < len(away) < len(tight.best.units)  # no more than need be
    assert {unit.optimizer_tier for unit in tight.best.units} == {"disk"}
    assert tight.best.prediction.peak_bytes < smallest
    least = advise(run, memory_bytes=nothing.smallest_budget_bytes, hardware=known).best
    assert {unit.parameter_tier for unit in least.units} == {"disk"}
    assert least.prediction.exposed_transfer_s > tight.best.prediction.exposed_transfer_s
    assert f"keeps parameters and gradients of {len(away)} unit" in tight.best.why
    assert plan_from_json(plan_to_json(tight.best), "it") == tight.best
    states = captured_step(run).states.values()
    assert nothing.smallest_budget_bytes > sum(
        unit.parameter_bytes for unit in states
    )  # as the script makes them


def test_parameters_go_to_disk_of_split_micro_batches_where_nothing_else_fits():
    disk = TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    known = dataclasses.replace(MEASURED, disk=disk)
    run = run_of_four_samples(num_blocks=4, hidden=64, vocabulary=64, sequence=512)
    nothing = advise(run, memory_bytes=1, hardware=known)
    whole = min(p.prediction.peak_bytes for p in nothing.plans if not p.changes_script)
    fits, least = (
        advise(run, memory_bytes=size, hardware=known) for size in (whole, nothing.smallest_budget_bytes)
    )

    assert fits.best.grad_accum == 1
    assert all(p.plan.parameter_tiers == {"device"} for p in fits.plans if p.changes_script)
    assert {unit.parameter_tier for unit in least.best.units} == {"disk"}
    assert (least.best.micro_batch_size, least.best.grad_accum) == (1, 4)


def test_a_model_whose_units_were_not_seen_to_run_is_noted():
    """torch.compile makes one graph of all blocks; why nothing is recomputed was left to the reader."""
    run = make_run(num_ranks=1)
    (rank,) = run.ranks
    spans = tuple(span for span in rank.spans if not span.kind.startswith("unit_"))
    compiled = dataclasses.replace(run, ranks=(dataclasses.replace(rank, spans=spans),))

    assert not any("by itself" in note for note in advise(run, memory_bytes=10**12).notes)
    assert any("by itself" in note for note in advise(compiled, memory_bytes=10**12).notes)


def test_what_is_lossy_and_gains_nothing_is_not_shown():
    """Of a plan with a lower peak and a shorter step than 8 bits are predicted to give, these are no alternative."""
    run = make_run(num_ranks=1)
    step, plan = captured_step(run), advise(run, memory_bytes=2**30).best
    coded = with_coded_states(step, plan, None, None)
    assert coded is not None

    def shown(peak_bytes, step_time_s=1e-9):
        predicted = dataclasses.replace(plan.prediction, peak_bytes=peak_bytes, step_time_s=step_time_s)
        exact = dataclasses.replace(plan, prediction=predicted)
        return [each.option for each in lossy_alternatives(step, exact, None, None)]

    assert "--optimizer-bits 8" in shown(coded.peak_bytes + 1)
    assert "--optimizer-bits 8" not in shown(coded.peak_bytes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plan_tells_what_each_lane_does_to_the_end_of_the_step_that_it_predicts(ranks):
    advice = advise(make_run(num_ranks=ranks), memory_bytes=4 * 10**6, hardware=MEASURED)

    for ranked in advice.plans:
        timeline = ranked.plan.timeline
        ends = [each.end_s for each in timeline if each.lane == "compute"]
        assert max(ends) == pytest.approx(ranked.prediction.step_time_s, rel=1e-5)
        assert any(each.label == "forward of blocks.1" for each in timeline)
        assert any(each.lane == "collective" for each in timeline) == (ranks > 1)


def test_a_plan_tells_what_the_run_that_it_is_of_took_without_it():
    advice = advise(RUN, memory_bytes=4 * 10**6)

    plain = advice.plans[0].plan.plain
    assert (plain.peak_bytes, plain.step_time_s) == (advice.measured_peak_bytes, advice.measured_step_time_s)
    assert plain.num_ranks == 2
    larger = advise(RUN, memory_bytes=4 * 10**6, micro_batch=8)
    assert larger.plans[0].plan.plain is None  # nobody ran that
