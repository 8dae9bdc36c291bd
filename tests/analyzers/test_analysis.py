import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.run.records import CATEGORIES, TABLES
from memadvisor.run.store import load_run
from tests.analyzers.test_comparison import PLAN
from tests.analyzers.test_utilization import HARDWARE
from tests.make_run import make_run, write_run

# The stable part of `show --json`; docs/json.md says what each means. It grows, and never shrinks.
TOP = {"format", "run", "ranks", "missing_ranks", "prediction"}
RANK = {
    "rank": None,
    "peak": {"allocated_bytes", "reserved_bytes", "unexplained_bytes", "by_category_bytes"},
    "model_states": {
        "num_params",
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_state_bytes",
        "expected_bytes",
    },
    "step_time_s": None,
    "tokens_per_s": None,
    "utilization": {"mfu", "hfu", "convention", "model_flops_per_step", "executed_flops_per_step"},
    "communication": {"bytes", "time_s", "exposed_s", "waiting_s"},
    "overhead": {"timed_step_fraction"},
}
CRASHED = {"exit_code": None, "num_steps": 1, "traced_step": None}
NO_STEP = {"exit_code": 1, "num_steps": 0, "exception": "ValueError"}


def to_json(run, hardware=None):
    """Through text and back, so that nothing but JSON remains; NaN and infinity are no JSON."""
    return json.loads(json.dumps(analysis_to_json(analyze(run, hardware)), allow_nan=False))


@pytest.mark.parametrize("changes", [{}, {"plan": PLAN}, {"traced_step": None}, CRASHED, NO_STEP])
def test_the_stable_keys_are_there_whatever_was_recorded(changes):
    value = to_json(make_run(**changes))

    assert value.keys() >= TOP
    for rank in value["ranks"]:
        assert rank.keys() >= RANK.keys()
        for key, inner in RANK.items():
            assert inner is None or rank[key].keys() >= inner
        assert tuple(rank["peak"]["by_category_bytes"]) == CATEGORIES


def test_figures_are_the_analyzers():
    rank = to_json(make_run(), HARDWARE)["ranks"][0]

    assert rank["peak"]["allocated_bytes"] == 4_052_872
    assert rank["model_states"]["expected_bytes"] == 16 * 212_992
    assert rank["step_time_s"] == pytest.approx(0.102)
    assert rank["tokens_per_s"] == pytest.approx(128 / 0.102)
    assert rank["utilization"]["mfu"] == pytest.approx(
        rank["utilization"]["model_flops_per_step"] / 0.102 / 1e10
    )
    assert rank["communication"]["bytes"] == 4 * 212_992
    assert rank["overhead"]["timed_step_fraction"] == pytest.approx(0.01)


def test_what_was_not_recorded_is_null_not_zero():
    rank = to_json(make_run(**NO_STEP))["ranks"][0]

    assert rank["step_time_s"] is None
    assert rank["peak"]["allocated_bytes"] is None
    assert set(rank["peak"]["by_category_bytes"].values()) == {None}
    assert rank["model_states"]["num_params"] is None
    assert rank["communication"]["bytes"] is None
    assert (rank["exit_code"], rank["exception"]) == (1, "ValueError")


def test_prediction_stands_beside_measurement():
    prediction = to_json(make_run(plan=PLAN))["prediction"]

    assert prediction["peak_bytes"]["predicted"] == 5_000_000
    assert prediction["peak_bytes"]["measured"] == 4_052_872
    assert prediction["step_time_s"]["measured"] == pytest.approx(0.102)
    assert prediction["by_category_bytes"]["parameter"] == {
        "predicted": 851_968,
        "measured": 851_968,
        "error_fraction": 0,
    }
    assert to_json(make_run())["prediction"] is None


def test_missing_ranks_are_named_and_throughput_is_then_unknown():
    run = make_run(num_ranks=3, missing_ranks=(1,))

    assert to_json(run)["missing_ranks"] == [1]
    assert [rank["rank"] for rank in to_json(run)["ranks"]] == [0, 2]
    assert to_json(run)["tokens_per_s"] is None
    assert to_json(make_run(num_ranks=3))["tokens_per_s"] == pytest.approx(3 * 128 / 0.102)


def test_a_run_read_from_disk_gives_the_same_results(tmp_path):
    run = make_run(plan=PLAN)
    loaded = load_run(write_run(run, tmp_path / "run"))

    assert loaded.problems == ()
    assert to_json(dataclasses.replace(loaded, path=run.path)) == to_json(run)


def test_the_largest_rank_has_the_highest_peak():
    run = make_run()
    smaller = tuple(
        dataclasses.replace(step, peak_allocated_bytes=1) if step.traced else step
        for step in run.ranks[0].steps
    )
    run = dataclasses.replace(run, ranks=(dataclasses.replace(run.ranks[0], steps=smaller), run.ranks[1]))

    assert analyze(run).largest_rank.rank == 1
    assert analyze(make_run(**NO_STEP)).largest_rank.rank == 0


@pytest.mark.parametrize("table", TABLES)
def test_a_table_that_was_lost_takes_only_its_own_results_along(table):
    """A damaged frame leaves a table empty; everything else is still worked out."""
    run = make_run(plan=PLAN)
    run = dataclasses.replace(
        run, ranks=tuple(dataclasses.replace(rank, **{table: ()}) for rank in run.ranks)
    )
    rank = to_json(run, HARDWARE)["ranks"][0]

    assert (rank["step_time_s"] is None) == (table == "steps")
    assert (rank["peak"]["allocated_bytes"] is None) == (table in ("steps", "storages"))
    assert (rank["utilization"]["model_flops_per_step"] is None) == (table in ("steps", "operators"))


@settings(max_examples=25, deadline=None)
@given(
    num_ranks=st.integers(1, 3),
    num_blocks=st.integers(1, 4),
    num_micro_batches=st.integers(1, 3),
    num_steps=st.integers(0, 6),
    traced_step=st.one_of(st.none(), st.integers(0, 5)),
    rank_delay_s=st.sampled_from((0.0, 0.001, 0.05)),
    unexplained_bytes=st.integers(-(10**6), 10**6),
    recompute=st.sets(st.sampled_from(("blocks.0", "blocks.1", "blocks.2"))).map(tuple),
)
def test_parts_sum_to_the_whole(**changes):
    for rank in analyze(make_run(**changes), HARDWARE).ranks:
        if rank.peak is not None:
            parts = sum(rank.peak.by_category_bytes.values()) + rank.peak.unexplained_bytes
            assert parts == rank.peak.allocated_bytes
            modules = sum(row.size_bytes for row in rank.peak.by_module)
            assert modules == sum(rank.peak.by_category_bytes.values())
        if rank.step_time is not None:
            assert sum(rank.step_time.by_phase_s.values()) == pytest.approx(rank.step_time.median_s)
            units = sum(u.forward_s + u.backward_s + u.recompute_s for u in rank.step_time.units)
            phases = rank.step_time.by_phase_s
            assert units == pytest.approx(phases["forward"] + phases["backward"])
        if rank.communication is not None:
            traffic = rank.communication  # on a CPU, where all of it is known
            assert traffic.exposed_s + traffic.overlapped_s == pytest.approx(traffic.time_s)
            assert 0 <= traffic.waiting_s <= traffic.time_s + 1e-9
        if rank.utilization.hfu is not None:
            assert rank.utilization.hfu >= rank.utilization.mfu > 0
