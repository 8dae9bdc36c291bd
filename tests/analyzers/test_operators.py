import dataclasses
from itertools import pairwise

import pytest

from memadvisor.analyzers.operators import operator_table
from tests.analyzers.measured_models import run_of
from tests.make_run import make_run


def table_of(run):
    return operator_table(run.ranks[0])


@pytest.mark.parametrize("kind", ["made", "gpt", "moe", "lstm"])
def test_both_tables_sum_to_the_traced_steps_operators(kind):
    run = make_run(num_ranks=1) if kind == "made" else run_of(kind)
    rows = run.ranks[0].operators
    found = table_of(run)

    for totals in (found.by_operator, found.by_module):
        assert sum(total.num_calls for total in totals) == len(rows)
        assert sum(total.executed_flops for total in totals) == sum(row.executed_flops for row in rows)
        assert sum(total.read_bytes for total in totals) == sum(row.read_bytes for row in rows)
        assert sum(total.time_s for total in totals) == pytest.approx(found.time_s)
        assert sum(total.time_fraction for total in totals) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["gpt", "moe", "lstm", "resnet"])
def test_recorded_operators_never_hold_each_other(kind):
    """Else the tables would count what they hold twice."""
    rows = sorted(run_of(kind).ranks[0].operators, key=lambda row: row.start_s)

    assert all(before.end_s <= after.start_s for before, after in pairwise(rows))


def test_a_product_of_a_gpt_moves_its_factors_and_its_result():
    """Forward of the head: (32, 32) by (32, 96), 4 bytes each."""
    rows = [
        row for row in run_of("gpt").ranks[0].operators if row.module == "head" and row.phase == "forward"
    ]
    product = next(row for row in rows if row.name == "aten::mm")

    assert product.read_bytes == 4 * (32 * 32 + 32 * 96)
    assert product.written_bytes == 4 * 32 * 96


def test_longest_come_first_and_on_an_accelerator_times_are_of_launching():
    found = table_of(make_run(num_ranks=1))
    times = [total.time_s for total in found.by_operator]

    assert times == sorted(times, reverse=True)
    assert not found.time_is_launch
    assert table_of(make_run(num_ranks=1, device="cuda:0")).time_is_launch


def test_unknown_bytes_are_not_zero_and_no_operators_are_no_table():
    run = make_run(num_ranks=1)
    rank = run.ranks[0]
    old = tuple(dataclasses.replace(row, read_bytes=None, written_bytes=None) for row in rank.operators)

    totals = operator_table(dataclasses.replace(rank, operators=old)).by_operator
    assert all(total.read_bytes is None and total.moved_bytes is None for total in totals)
    assert operator_table(dataclasses.replace(rank, operators=())) is None
    assert table_of(make_run(traced_step=None)) is None
