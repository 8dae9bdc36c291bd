"""Ranks that split layers recompute the same units: against all choices, with the fullest rank deciding."""

import json
import math
import os
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.analysis import analyze
from memadvisor.errors import PlanError, UsageError
from memadvisor.plan import Plan, RankPlan, UnitPlan
from memadvisor.plan_checks import check_plan
from memadvisor.plan_file import load_plan, save_plan
from memadvisor.planning.stage_choice import Chosen
from memadvisor.planning.tensor_parallel import TensorSearch, advise_tensor_parallel, is_of_its_own
from memadvisor.run.documents import LATER_HOOK, Note
from memadvisor.run.parallel_records import TensorParallel
from memadvisor.run.records import Module
from memadvisor.run.store import load_run
from tests.make_run import make_run
from tests.planning.small_pipelines import a_pipeline
from tests.torch_exit import completed
from tests.tried_again import far_apart, some_try
from tests.warm_python import warm_python

kept = st.integers(1, 9).map(lambda count: count * 100_000)


@given(of_units=st.lists(st.tuples(kept, st.integers(1, 9)), min_size=1, max_size=4), share=st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_the_least_time_within_the_budget_is_found_for_all_ranks_at_once(of_units, share):
    """The second rank keeps a little more, so what fits the first need not fit."""
    first = [(size, 0, tenths / 10) for size, tenths in of_units]
    second = [(size + 50_000, 0, tenths / 10) for size, tenths in of_units]
    steps = [a_pipeline([units], 1).steps[0] for units in (first, second)]
    search = TensorSearch(steps)
    names = sorted(steps[0].recomputable)
    every = [Chosen(frozenset(c)) for size in range(len(names) + 1) for c in combinations(names, size)]
    low, high = (pick(max(search.peaks(units)) for units in every) for pick in (min, max))
    budget = int(low + share * (high - low))

    found = search.fastest(budget)

    best_s = min(search.point(units).step_time_s for units in every if max(search.peaks(units)) <= budget)
    assert found is not None and max(search.peaks(found)) <= budget
    assert search.point(found).step_time_s == pytest.approx(best_s)


ROOT = Path(__file__).parents[2]


def memadvisor(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return completed([warm_python(), "-m", "memadvisor", *words], cwd=ROOT, env=environment, timeout=150)


def on_two_ranks(command, directory, *options, script=("split_layers.py",)):
    """The script under a command."""
    name, *words = script
    return memadvisor(
        command, *options, "--nproc", "2", "--out", str(directory), f"tests/scripts/{name}", *words
    )


def peaks_of(run):
    return [rank.traced_step.peak_allocated_bytes for rank in run.ranks]


@pytest.mark.timeout(600)
def test_ranks_that_split_layers_hold_what_is_predicted_and_losses_stay_the_same(tmp_path):
    some_try(tmp_path, peaks_otherwise)


def peaks_otherwise(directory):
    plain = on_two_ranks("profile", directory / "plain")
    assert plain.returncode == 0, plain.stderr
    recorded = load_run(directory / "plain")
    peak_bytes = max(peaks_of(recorded))
    advice = advise_tensor_parallel(recorded, memory_bytes=int(0.85 * peak_bytes))
    save_plan(advice.plan, directory / "plan.json")
    assert load_plan(directory / "plan.json") == advice.plan and advice.recomputed

    applied = on_two_ranks("run", directory / "run", "--plan", str(directory / "plan.json"))

    assert applied.returncode == 0, applied.stderr
    assert applied.stdout == plain.stdout != ""
    pairs = analyze(load_run(directory / "run")).comparison.rank_peak_bytes.values()
    assert len(pairs) == 2
    return [fault for pair in pairs for fault in far_apart(pair.predicted, pair.measured, rel=0.005)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [(), ("--split",)])
def test_ranks_that_average_gradients_by_themselves_get_a_plan_that_applies(tmp_path, words):
    """Plans of ZeRO were all that was advised, and refused by `run`. Layers may meet the other ranks, too."""
    some_try(tmp_path, lambda directory: own_peaks_otherwise(directory, ("own_reductions.py", *words)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [(), ("--teacher",)])
def test_several_models_that_fsdp2_shards_get_a_plan_that_applies(tmp_path, words):
    """All that was said is that no plan is made for them. What FSDP2 gathers and frees stays as it is."""
    some_try(
        tmp_path, lambda directory: own_peaks_otherwise(directory, ("several_sharded.py", *words), "FSDP2")
    )


def own_peaks_otherwise(directory, script, whose="DistributedDataParallel"):
    plain = on_two_ranks("profile", directory / "plain", script=script)
    recorded, plan = str(directory / "plain"), str(directory / "plan.json")
    advised = memadvisor("advise", recorded, "--memory", "85%", "--json", "-o", plan)
    applied = on_two_ranks("run", directory / "run", "--plan", plan, script=script)
    others = memadvisor("advise", recorded, "--memory", "85%", "--json", "--gpus", "2")

    assert (plain.returncode, advised.returncode, applied.returncode) == (0, 0, 0), applied.stderr
    advice = json.loads(advised.stdout)
    predicted = [rank["predicted_peak_bytes"] for rank in advice["own_parallelism"]["ranks"]]
    assert advice["own_parallelism"]["recomputed"] and advice["plans"] == []
    assert any(whose in note for note in advice["notes"])
    assert applied.stdout == plain.stdout != ""
    if whose == "FSDP2":
        assert others.returncode == 2 and "chooses what all ranks recompute alike" in others.stderr
    else:
        assert json.loads(others.stdout)["plans"]
    measured = peaks_of(load_run(directory / "run"))
    return [fault for pair in zip(predicted, measured, strict=True) for fault in far_apart(*pair, rel=0.005)]


def test_a_hook_that_begins_behind_the_traced_step_is_told_with_the_plan():
    """PowerSGD's error is as large as all gradients: what fitted was said to fit, without a word."""
    run = make_run(num_ranks=2)
    notes = (
        Note(level="warning", text=f"{LATER_HOOK}PowerSGDState) begins at its iteration 1000.", time_s=None),
    )
    own = (
        replace(rank, process=replace(rank.process, rank=n, has_ddp=False), notes=notes)
        for n, rank in enumerate(run.ranks)
    )

    advice = advise_tensor_parallel(replace(run, ranks=tuple(own)), memory_bytes=1 << 30)

    (told,) = [note for note in advice.notes if LATER_HOOK in note]
    assert told.endswith("What fits here may not fit then.")


def test_fsdp1_and_older_runs_are_planned_for_as_before():
    """What FSDP1 gathers for a second run of a unit is not played."""
    run = make_run(num_ranks=2)
    process = run.ranks[0].process
    own = [replace(rank, process=replace(process, rank=n, has_ddp=False)) for n, rank in enumerate(run.ranks)]
    sharding = [replace(rank, modules=(Module("", "FullyShardedDataParallel", ""),)) for rank in own]

    assert not is_of_its_own(run)
    assert is_of_its_own(replace(run, ranks=tuple(own)))
    assert not is_of_its_own(replace(run, ranks=tuple(sharding)))
    assert not is_of_its_own(replace(run, ranks=(own[0], run.ranks[1])))


@pytest.mark.parametrize(
    ("phase", "share", "is_planned"),
    [("optimizer", 1.0, True), ("optimizer", 0.01, False), ("backward", 1.0, False)],
)
def test_an_optimizer_that_shares_out_its_updates_itself_keeps_them(phase, share, is_planned):
    """`run` refuses to share it out once more; a norm or a loss, sent in a step's closure or hooks, is nothing of it."""
    run = make_run(num_ranks=2)
    size_bytes = int(share * sum(each.size_bytes for each in run.ranks[0].parameters))
    ranks = []
    for rank in run.ranks:
        sent = replace(rank.collectives[0], operation="all_gather", phase=phase, size_bytes=size_bytes)
        process = replace(rank.process, has_ddp=True)
        ranks.append(replace(rank, process=process, collectives=(*rank.collectives, sent)))

    assert is_of_its_own(replace(run, ranks=tuple(ranks))) is is_planned


@pytest.mark.parametrize("has", ["has_ddp_hook", "has_ddp_join", "has_zero_optimizer", "has_replicate"])
def test_what_the_engine_does_not_do_in_ddps_place_stays_with_its_buckets(has):
    """No engine replaces DDP then: its buckets, alive all the time, are a part of every plan's peak."""
    run = make_run(num_ranks=2)
    ranks = []
    for rank in run.ranks:
        longest = max(rank.storages, key=lambda row: (row.death_s or math.inf) - row.birth_s)
        bucket = replace(longest, storage_id=10**6, category="communication", size_bytes=10**6)
        process = replace(rank.process, has_ddp=True, **{has: True})
        step = replace(rank.traced_step, peak_allocated_bytes=rank.traced_step.peak_allocated_bytes + 10**6)
        rest = tuple(each for each in rank.steps if each.index != step.index)
        ranks.append(replace(rank, process=process, storages=(*rank.storages, bucket), steps=(*rest, step)))
    run = replace(run, ranks=tuple(ranks))

    assert is_of_its_own(run)
    advice = advise_tensor_parallel(run, memory_bytes=1 << 30)
    assert not advice.recomputed
    assert [each.predicted_peak_bytes for each in advice.ranks] == [
        each.measured_peak_bytes for each in advice.ranks
    ]


def test_a_plan_whose_ranks_would_wait_for_each_other_for_ever_is_refused():
    """As one that was edited by hand."""
    units = (
        UnitPlan(name="0", zero_stage=0, recompute=True),
        UnitPlan(name="0", zero_stage=0, recompute=False),
    )
    ranks = tuple(RankPlan(rank=rank, fingerprint="f", units=(unit,)) for rank, unit in enumerate(units))
    plan = Plan(num_ranks=2, zero_stage=0, policy="chosen", ranks=ranks)
    check_plan(plan, "A pipeline's")
    with pytest.raises(PlanError, match="rank 1 recompute other units than rank 0"):
        check_plan(replace(plan, ranks_alike=True), "It")


@pytest.mark.parametrize("parts", [(2, 4, 2, 2), (2, 1, 2, 2)])
def test_ranks_that_split_layers_otherwise_than_others_are_refused(parts):
    run = make_run(num_ranks=4)
    ranks = [
        replace(rank, tensor_parallel=(TensorParallel("", n),))
        for rank, n in zip(run.ranks, parts, strict=True)
    ]
    with pytest.raises(UsageError, match="on some ranks of the run"):
        advise_tensor_parallel(replace(run, ranks=tuple(ranks)), memory_bytes=1 << 30)
