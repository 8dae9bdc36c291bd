"""What each rank of a pipeline recomputes: against all choices of all ranks, and as it then runs."""

import os
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.captured_pipeline import captured_pipelines
from memadvisor.cost.transfers import TransferTimes
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan_file import load_plan, save_plan
from memadvisor.planning import stage_choice
from memadvisor.planning.pipelines import PipelineSearch, advise_pipeline
from memadvisor.planning.stage_choice import Chosen, StageChoice
from memadvisor.run.store import load_run
from memadvisor.schedule import Lane
from tests.planning.small_pipelines import BASE_BYTES, a_pipeline, pipelines
from tests.torch_exit import completed
from tests.tried_again import far_apart, some_try
from tests.warm_python import warm_python


def every_choice(rank):
    names = sorted(rank.step.recomputable)
    return [Chosen(frozenset(c)) for size in range(len(names) + 1) for c in combinations(names, size)]


@given(pipeline=pipelines(), share=st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_no_choice_of_units_and_ranks_within_the_budget_takes_a_shorter_step(pipeline, share):
    search = PipelineSearch(pipeline)
    fitting = [every_choice(rank) for rank in search.ranks]
    low = max(
        min(rank.play(units).peak_bytes for units in own)
        for rank, own in zip(search.ranks, fitting, strict=True)
    )
    high = max(step.peak_bytes for step in pipeline.steps)
    budget = int(low + share * (high - low))
    fitting = [
        [units for units in own if rank.play(units).peak_bytes <= budget]
        for rank, own in zip(search.ranks, fitting, strict=True)
    ]
    shortest_s = min(map(search.step_s, product(*fitting)))

    found = search.fastest(budget)

    assert max(search.peaks(search.smallest())) == low
    assert None not in found and max(search.peaks(found)) <= budget
    assert search.step_s(found) == pytest.approx(shortest_s)


@given(pipeline=pipelines(most_units=6), share=st.floats(0, 1))
@settings(max_examples=30, deadline=None)
def test_where_choices_are_many_the_programmes_find_one_as_fast(pipeline, share):
    step = pipeline.steps[0]
    exact = StageChoice(step)
    low = exact.play(exact.smallest()).peak_bytes
    budget = int(low + share * (step.peak_bytes - low))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_choice, "_SEGMENTS_PLAYED", 0)
        found = StageChoice(step).fastest(budget)

    assert found is not None and exact.play(found).peak_bytes <= budget
    assert exact.play(found).step_time_s == pytest.approx(exact.play(exact.fastest(budget)).step_time_s)


@given(pipeline=pipelines())
@settings(max_examples=20, deadline=None)
def test_pieces_are_played_in_their_ranks_order_for_their_time_and_end_with_the_step(pipeline):
    search = PipelineSearch(pipeline)
    choices = [Chosen(frozenset(rank.step.recomputable)) for rank in search.ranks]

    for chosen in ([Chosen()] * len(search.ranks), choices):
        added_s = search._added_s(pipeline, chosen)
        played = pipeline.pieces(added_s)
        assert [tuple(piece.work for piece in own) for own in played] == list(pipeline.works)
        pieces = [piece for own in played for piece in own]
        for piece in pieces:
            took_s = pipeline.seconds[piece.work] + added_s.get(piece.work, 0.0)
            assert piece.end_s - piece.start_s == pytest.approx(took_s)
        assert min(piece.start_s for piece in pieces) == 0
        assert max(piece.end_s for piece in pieces) == pytest.approx(search.play(chosen)[0].step_s)


def test_lanes_of_a_rank_are_its_micro_batches_passes():
    search = PipelineSearch(a_pipeline([[(1_000_000, 0, 0.1)]] * 2, 2))

    first, last = search.timelines([Chosen()] * 2)

    assert {each.label for each in first} == {each.label for each in last}
    assert [each.label for each in first][:2] == ["forward of micro-batch 0", "forward of micro-batch 1"]
    assert first[0].start_s == 0 and last[0].start_s >= first[0].end_s


def test_the_first_rank_recomputes_for_the_micro_batches_that_it_has_under_way():
    """Two units of a million bytes on each of three ranks: six, four and two of them are there at once."""
    unit = (1_000_000, 0, 0.1)
    search = PipelineSearch(a_pipeline([[unit, unit]] * 3, 6))

    assert search.peaks([Chosen()] * 3) == [BASE_BYTES + 1_000_000 * held for held in (6, 4, 2)]
    assert [len(units.recomputed) for units in search.fastest(4_100_000)] == [1, 0, 0]
    assert [len(units.recomputed) for units in search.fastest(2_100_000)] == [2, 1, 0]
    assert search.fastest(1_000_000)[0] is None


ROOT = Path(__file__).parents[2]


def memadvisor(command, directory, schedule, *options):
    """The run, and the losses that the script has printed."""
    words = [
        command,
        *options,
        "--nproc",
        "2",
        "--out",
        str(directory),
        "tests/scripts/pipelined.py",
        schedule,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = completed([warm_python(), "-m", "memadvisor", *words], cwd=ROOT, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    return load_run(directory), done.stdout


TIMES = TransferTimes({Lane.DISK: TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)}, "a test")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("schedule", "by_hand"),
    [
        ("Schedule1F1B", ("--offload-activations", "disk")),
        ("ScheduleInterleaved1F1B", ("--policy", "every-layer")),
    ],
)
def test_what_ranks_are_predicted_to_hold_they_hold_and_losses_stay_the_same(tmp_path, schedule, by_hand):
    """To the byte; of two stages, and of four of which each rank has two. A plan made by hand is for all of them."""
    some_try(tmp_path, lambda directory: peaks_otherwise(directory, schedule, by_hand))


def peaks_otherwise(directory, schedule, by_hand):
    plain, losses = memadvisor("profile", directory / "plain", schedule)
    budget = int(0.7 * captured_pipelines(plain)[0].steps[0].peak_bytes)
    advice = advise_pipeline(plain, memory_bytes=budget)
    save_plan(advice.plan, directory / "plan.json")
    assert load_plan(directory / "plan.json") == advice.plan

    applied, losses_applied = memadvisor(
        "run", directory / "run", schedule, "--plan", str(directory / "plan.json")
    )

    compared = analyze(applied).comparison
    assert losses_applied == losses != ""
    assert advice.ranks[0].recomputed and advice.ranks[0].num_in_flight > advice.ranks[1].num_in_flight
    pairs = compared.rank_peak_bytes.values()
    faults = [fault for pair in pairs for fault in far_apart(pair.predicted, pair.measured, rel=0)]
    faults += [] if compared.within_budget else [f"over the budget of {budget} B"]

    run, losses_by_hand = memadvisor("run", directory / "hand", schedule, *by_hand)
    search = PipelineSearch(*captured_pipelines(plain), times=TIMES)
    blocks = [frozenset(u.name for u in place.step.units if u.is_block) for place in search.places]
    chosen = [Chosen(own) if "--policy" in by_hand else Chosen(moved=own) for own in blocks]
    assert losses_by_hand == losses
    for predicted, rank in zip(search.peaks(chosen), run.ranks, strict=True):
        faults += far_apart(predicted, rank.traced_step.peak_allocated_bytes, rel=0)
    return faults
