"""Which all-reduces share a message."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from memadvisor.executors import Algorithm
from memadvisor.merged_reductions import merged_units
from memadvisor.plan import Plan, UnitPlan


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3)), max_size=12),
    st.integers(1, 300),
)
def test_neighbours_share_messages_below_the_limit_and_none_could_take_the_next_one(
    sizes_and_stages, limit_bytes
):
    units = tuple(
        UnitPlan(name=str(number), zero_stage=stage, recompute=False)
        for number, (_, stage) in enumerate(sizes_and_stages)
    )
    sizes = {str(number): size for number, (size, _) in enumerate(sizes_and_stages)}
    merge = Algorithm(operation="all_reduce", min_bytes=0, name="merged")
    native = Algorithm(operation="all_reduce", min_bytes=limit_bytes, name="native")
    plan = Plan(num_ranks=2, zero_stage=0, units=units, algorithms=(merge, native))

    found = merged_units(plan, [units], sizes)

    small = [u.name for u in reversed(units) if sizes[u.name]]
    may = {u.name for u in units if u.zero_stage < 2 and 0 < sizes[u.name] < limit_bytes}
    groups = list(dict.fromkeys(found.get(name, (name,)) for name in small))
    assert [name for group in groups for name in group] == small
    for group in groups:
        assert len(group) == 1 or (set(group) <= may and sum(sizes[name] for name in group) < limit_bytes)
    for first, second in itertools.pairwise(groups):
        if {*first, second[0]} <= may:
            assert sum(sizes[name] for name in (*first, second[0])) >= limit_bytes
    assert merged_units(Plan(num_ranks=2, zero_stage=0, units=units), [units], sizes) == {}
