import dataclasses

from hypothesis import given, settings

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.saved_difference import saved_tensors
from tests.analyzers.test_run_difference import RUNS
from tests.make_run import make_run


def kept(run):
    return analyze(run).ranks[0].activations


@settings(max_examples=15, deadline=None)
@given(RUNS, RUNS)
def test_differences_of_all_kinds_sum_to_that_of_what_is_kept(before, after):
    first, second = kept(before), kept(after)
    rows = saved_tensors(first, second)
    if rows is None:
        assert None in (first, second)
        return
    assert sum(row.saved_bytes.difference for row in rows) == second.saved_bytes - first.saved_bytes
    for row in rows:
        assert row.saved_bytes.difference == row.size_bytes * row.num_kept.difference != 0


def test_what_a_block_no_longer_keeps_is_named_by_its_modules_the_largest_first():
    whole = kept(make_run(num_ranks=1))
    rest = tuple(life for life in whole.lifetimes if life.unit != "blocks.1")

    rows = saved_tensors(whole, dataclasses.replace(whole, lifetimes=rest))

    assert rows
    assert all(row.module.startswith("blocks.1") and row.num_kept.after == 0 for row in rows)
    assert sum(row.num_kept.before for row in rows) == len(whole.lifetimes) - len(rest)
    sizes = [row.saved_bytes.before for row in rows]
    assert sizes == sorted(sizes, reverse=True)


def test_what_a_second_forward_makes_again_is_not_kept():
    whole = kept(make_run(num_ranks=1))
    again = tuple(dataclasses.replace(life, is_made_again=True) for life in whole.lifetimes)

    rows = saved_tensors(whole, dataclasses.replace(whole, lifetimes=again))

    assert sum(row.saved_bytes.difference for row in rows) == -whole.saved_bytes


def test_several_micro_batches_count_as_one():
    one, three = (kept(make_run(num_ranks=1, num_micro_batches=number)) for number in (1, 3))

    assert saved_tensors(one, three) == ()
    assert sum(life.size_bytes for life in three.of_one_micro_batch) == three.saved_bytes
