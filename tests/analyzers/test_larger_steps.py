import dataclasses

import pytest

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.analyzers.larger_steps import LargerSteps, larger_steps
from memadvisor.gates import Limits, judge
from memadvisor.planning.advice_notes import size_notes
from memadvisor.report.next_steps import next_steps
from memadvisor.report.view import RankView
from tests.make_run import make_run, step


def ranks_of(*sizes, traced=2, field="largest_input_elements"):
    """Ranks whose steps have these sizes, one list a rank."""
    ranks = make_run(num_ranks=len(sizes), traced_step=traced).ranks
    return tuple(
        dataclasses.replace(
            rank,
            steps=tuple(
                step(index=index, start_s=index, end_s=index + 1.0, traced=index == traced, **{field: size})
                for index, size in enumerate(own)
            ),
        )
        for rank, own in zip(ranks, sizes, strict=True)
    )


def test_the_step_with_the_largest_call_is_named():
    assert larger_steps(ranks_of([900, 100, 300, 301, 1500, 1500, None])) == LargerSteps(
        compared="input_elements",
        step=4,
        size=1500,
        traced_step=2,
        traced_size=300,
        num_larger=3,
        num_compared=5,
    )


def test_the_first_step_is_named_where_no_other_is_larger_alone():
    """Traced, as was advised, it has no state of optimizers: its peak is none that comes again."""
    found = larger_steps(ranks_of([900, 100, 300, 301, 500, 400]))
    assert found is not None
    assert (found.step, found.num_larger, found.num_compared) == (4, 2, 4)
    assert "in 2 of 4 steps after the first whose inputs were recorded" in found.in_words

    alone = larger_steps(ranks_of([900, 100, 300, 301]))
    assert alone is not None
    assert (alone.step, alone.num_larger, alone.num_compared) == (0, 1, 3)
    peaks = larger_steps(ranks_of([900, 100, 300, 500], field="peak_allocated_bytes"))
    assert peaks is not None
    assert peaks.step == 0


def test_ranks_count_by_the_one_that_has_most():
    """Rank 1's step 3 is larger than its own traced one, and smaller than rank 0's."""
    assert larger_steps(ranks_of([1, 1, 500, 400], [1, 1, 100, 450])) is None
    found = larger_steps(ranks_of([1, 1, 500, 400], [1, 1, 100, 600]))
    assert found is not None
    assert (found.step, found.size, found.traced_size) == (3, 600, 500)


@pytest.mark.parametrize(
    "ranks",
    [
        ranks_of([300, 300, 300, 305]),  # no batch but a few elements larger
        ranks_of([300, 300, None, 900]),
        ranks_of([None, None, 300, None]),
        ranks_of([9, 9, 9, 900], traced=None),
    ],
)
def test_nothing_is_said_where_none_is_larger_or_it_is_not_known(ranks):
    assert larger_steps(ranks) is None


def test_peaks_tell_where_the_allocator_kept_them():
    """On CUDA a larger batch that took no more memory is no larger step."""
    inputs = ranks_of([100, 100, 100, 900])[0]
    peaks = ranks_of([7, 50, 50, 50], field="peak_allocated_bytes")[0]
    both = [
        dataclasses.replace(a, peak_allocated_bytes=b.peak_allocated_bytes)
        for a, b in zip(inputs.steps, peaks.steps, strict=True)
    ]
    assert larger_steps([dataclasses.replace(inputs, steps=tuple(both))]) is None
    found = larger_steps(ranks_of([7, 60, 50, 2**30], field="peak_allocated_bytes"))
    assert found is not None
    assert (found.compared, found.step, found.num_larger) == ("peak_bytes", 3, 2)
    assert "the highest 1.00 GiB in step 3" in found.in_words


@pytest.mark.parametrize(("size", "times"), [(306 + 3, "(3 % more)"), (1500, "(5.0 times as much)")])
def test_the_words_say_how_much_and_what_to_do(size, times):
    found = larger_steps(ranks_of([1, 1, 300, size]))
    assert found is not None
    assert times in found.in_words
    assert found.in_words.endswith("profile again with --trace-step 3.")


def test_every_view_says_that_the_peak_is_of_a_smaller_step():
    run = make_run(num_ranks=1)
    traced = run.ranks[0].traced_step
    steps = tuple(
        dataclasses.replace(each, largest_input_elements=300 if each.index == traced.index else 1500)
        for each in run.ranks[0].steps
    )
    run = dataclasses.replace(run, ranks=(dataclasses.replace(run.ranks[0], steps=steps),))
    analysis = analyze(run)
    words = larger_steps(run.ranks).in_words

    assert analysis_to_json(analysis)["larger_steps"]["traced_size"] == 300
    steps = next_steps(RankView(analysis, run.ranks[0], analysis.ranks[0], 300))
    assert words in [step.text for step in steps]
    assert [f"{words} What fits here may not fit there."] == list(size_notes(run))
    gate = judge(analysis, Limits(max_peak_bytes=2**40), None).gates[0]
    assert gate.where.endswith("larger ones were not traced")


def test_a_later_step_that_trains_more_is_named():
    """Of layers that are unfrozen one after another. What the first steps had tells nothing: an engine watches them."""
    found = larger_steps(ranks_of([9000, 100, 5000, 5001, 20000, 30000, None], field="gradient_bytes"))
    assert found is not None
    assert (found.compared, found.step, found.size, found.num_larger, found.num_compared) == (
        "gradient_bytes",
        5,
        30000,
        2,
        3,
    )
    assert "in the traced one the most that one had was 4.88 KiB" in found.in_words
    assert larger_steps(ranks_of([9000, 100, 5000, 5001], field="gradient_bytes")) is None
