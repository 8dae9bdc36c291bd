import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.run_difference import run_difference
from memadvisor.cli.diff_json import difference_to_json
from memadvisor.run.records import TABLES
from tests.make_run import make_run


def difference(before, after):
    return run_difference(analyze(before), analyze(after))


def changes(value):
    """Every change in the JSON, with where it stands."""
    if isinstance(value, dict) and "difference" in value:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from changes(part)


def test_a_difference_is_after_less_before_and_none_where_a_side_is_not_recorded():
    assert Change(before=4, after=5).difference == 1
    assert Change(before=4, after=5).change_fraction == 0.25
    assert Change(before=0, after=5).change_fraction is None
    for change in (Change(before=None, after=5), Change(before=5, after=None)):
        assert change.difference is None
        assert change.change_fraction is None


RUNS = st.builds(
    make_run,
    num_ranks=st.integers(1, 3),
    num_blocks=st.integers(1, 3),
    num_steps=st.integers(0, 7),
    traced_step=st.sampled_from((None, 0, 3)),
    recompute=st.sampled_from(((), ("blocks.0",))),
    exit_code=st.sampled_from((None, 0, 1)),
)


@settings(max_examples=15, deadline=None)
@given(RUNS)
def test_a_run_does_not_differ_from_itself(run):
    found = difference(run, run)
    value = difference_to_json(found)

    assert found.settings == ()
    assert all(change["difference"] in (0, None) for change in changes(value))
    assert all(change["before"] == change["after"] for change in changes(value))
    assert all(rank.modules in ((), None) and rank.operators in ((), None) for rank in found.ranks)
    assert not any(rank.step_time.shift and rank.step_time.shift.is_significant for rank in found.ranks)


@settings(max_examples=15, deadline=None)
@given(RUNS, RUNS)
def test_categories_sum_to_the_peak_also_in_their_differences(before, after):
    for rank in difference(before, after).ranks:
        if rank.peak_bytes.difference is not None:
            assert (
                sum(change.difference for change in rank.by_category_bytes.values())
                == rank.peak_bytes.difference
            )


def test_recomputing_a_block_runs_its_products_again_and_keeps_its_input():
    """Four more calls of mm; (4, 32, 64) float32 are 32 KiB more. A module that saved nothing keeps 0 bytes."""
    (rank,) = difference(make_run(num_ranks=1), make_run(num_ranks=1, recompute=("blocks.1",))).ranks

    kept = {row.name: row for row in rank.modules}
    assert kept["blocks.1"].saved_bytes == Change(before=0, after=32 * 2**10)
    assert kept["blocks.1"].only_in == ""
    assert rank.saved_bytes.difference == 32 * 2**10
    called = {row.name: row.num_calls.difference for row in rank.operators}
    assert called["aten::mm"] == 4
    assert rank.executed_flops_per_step.difference > 0
    assert rank.model_flops_per_step.difference == 0


def test_modules_that_one_model_alone_has_are_said_to_be_its_own():
    (rank,) = difference(make_run(num_ranks=1), make_run(num_ranks=1, num_blocks=4)).ranks
    (back,) = difference(make_run(num_ranks=1, num_blocks=4), make_run(num_ranks=1)).ranks

    own = {row.name for row in rank.modules if row.only_in == "after"}
    assert "blocks.3.mlp.up" in own
    assert all(name.startswith("blocks.3") for name in own)
    assert {row.name for row in back.modules if row.only_in == "before"} == own
    assert all(row.saved_bytes.before is None for row in rank.modules if row.name in own)


def test_slower_steps_are_told_from_noise():
    """make_run's steps are all of one length; 8 of them on each side leave no doubt."""
    runs = [make_run(num_ranks=1, num_steps=13, block_s=block_s) for block_s in (0.008, 0.009)]
    (rank,) = difference(*runs).ranks

    assert rank.step_time.num_steps == Change(before=8, after=8)
    assert rank.step_time.shift.is_significant
    assert rank.step_time.shift.shift_s == pytest.approx(rank.step_time.median_s.difference)


def test_ranks_of_one_run_alone_are_named():
    found = difference(make_run(num_ranks=3, missing_ranks=(0,)), make_run(num_ranks=2))

    assert [rank.rank for rank in found.ranks] == [1]
    assert found.ranks_only_before == (2,)
    assert found.ranks_only_after == (0,)
    assert found.tokens_per_s.difference is None


def test_runs_without_a_common_rank_have_no_largest():
    found = difference(make_run(num_ranks=2, missing_ranks=(1,)), make_run(num_ranks=2, missing_ranks=(0,)))

    assert found.ranks == ()
    assert found.largest_rank is None


@pytest.mark.parametrize("table", TABLES)
def test_a_run_that_lost_a_table_is_compared_by_what_is_left(table):
    run = make_run(num_ranks=1)
    ranks = tuple(dataclasses.replace(rank, **{table: ()}) for rank in run.ranks)
    lost = dataclasses.replace(run, ranks=ranks)

    for found in (difference(run, lost), difference(lost, run)):
        assert len(found.ranks) == 1
        assert not any(row.only_in for row in found.ranks[0].modules or ())
