"""Ranks that split layers recompute the same units: against all choices, with the fullest rank deciding."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.errors import UsageError
from memadvisor.planning.stage_choice import Chosen
from memadvisor.planning.tensor_parallel import TensorSearch, advise_tensor_parallel
from tests.analyzers.test_data_ranks import split
from tests.make_run import make_run
from tests.planning.small_pipelines import a_pipeline

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


def test_tensor_parallelism_beside_another_parallelism_is_refused():
    with pytest.raises(
        UsageError, match="2 of the run's 4 ranks split the layers of a model, beside another"
    ):
        advise_tensor_parallel(split(make_run(num_ranks=4), 2), memory_bytes=1 << 30)
