"""States of a dynamic programme over a chain."""

from hypothesis import given
from hypothesis import strategies as st

from memadvisor.planning.chain import State, undominated


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1))
def test_a_state_stays_where_no_other_is_as_fast_and_frees_as_much(pairs):
    kept = undominated([State(added_s, freed_bytes, None, None) for added_s, freed_bytes in pairs])

    found = [(state.added_s, state.freed_bytes) for state in kept]
    assert found == sorted(
        pair
        for pair in set(pairs)
        if not any(other != pair and other[0] <= pair[0] and other[1] >= pair[1] for other in pairs)
    )


def test_what_was_chosen_is_told_from_the_first_unit_to_the_last():
    first = State(0.0, 0, None, None)
    last = State(3.0, 2, State(1.0, 1, State(0.0, 0, first, None), "whole"), "parts")

    assert last.ways() == [None, "whole", "parts"]
    assert first.ways() == []
