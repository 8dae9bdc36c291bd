from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.errors import UsageError
from memadvisor.planning.stage_split import StageLimit, UnitCost, split_stages


def unit(forward_s=1.0, backward_s=2.0, state_bytes=0, saved_bytes=0, message_s=0.0, name="u"):
    return UnitCost(
        name=name,
        forward_s=forward_s,
        backward_s=backward_s,
        state_bytes=state_bytes,
        saved_bytes=saved_bytes,
        message_s=message_s,
    )


def roomy(stages):
    return [StageLimit(memory_bytes=1e15, num_in_flight=stages - stage) for stage in range(stages)]


def all_latencies(units, limits, num_microbatches):
    """T and the bottleneck of every split that has room, by equation 2 as it stands."""
    for cuts in combinations(range(1, len(units)), len(limits) - 1):
        ends = (0, *cuts, len(units))
        times = []
        for limit, start, end in zip(limits, ends, ends[1:], strict=False):
            held = units[start:end]
            size = sum(u.state_bytes + limit.num_in_flight * u.saved_bytes for u in held)
            if size > limit.memory_bytes:
                break
            message_s = held[-1].message_s if end < len(units) else 0.0
            times.append(sum(u.forward_s + u.backward_s for u in held) + message_s)
        else:
            yield sum(times) + (num_microbatches - 1) * max(times), max(times)


units_of_chains = st.lists(
    st.builds(
        unit,
        forward_s=st.integers(0, 9),
        backward_s=st.integers(0, 9),
        state_bytes=st.integers(0, 9),
        saved_bytes=st.integers(0, 5),
        message_s=st.integers(0, 6),
    ),
    min_size=1,
    max_size=8,
)


@given(units=units_of_chains, data=st.data(), num_microbatches=st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_a_split_is_the_best_of_all_splits_that_have_room(units, data, num_microbatches):
    stages = data.draw(st.integers(1, len(units)))
    limits = [
        StageLimit(memory_bytes=data.draw(st.integers(0, 60)), num_in_flight=data.draw(st.integers(1, 4)))
        for _ in range(stages)
    ]
    found = split_stages(units, limits, num_microbatches)
    known = list(all_latencies(units, limits, num_microbatches))
    if not known:
        assert found is None
        return
    assert found is not None
    assert (found.latency_s, found.bottleneck_s) == min(known)
    assert sum(found.num_units) == len(units) and min(found.num_units) > 0
    assert all(size <= limit.memory_bytes for size, limit in zip(found.stage_bytes, limits, strict=True))


def test_a_dear_head_has_a_stage_of_its_own():
    """An even split would put two layers beside it."""
    layers = [unit() for _ in range(6)]
    found = split_stages([*layers, unit(forward_s=3.0, backward_s=6.0)], roomy(3), 8)
    assert found is not None and found.num_units == (3, 3, 1)


def test_the_chain_is_cut_where_messages_are_small():
    """Of cuts with the same bottleneck, as in a network whose activations shrink."""
    units = [unit(message_s=size) for size in (0.5, 0.1, 0.5, 0.0)]
    found = split_stages(units, roomy(2), 1)
    assert found is not None and found.num_units == (2, 2)
    assert found.latency_s == pytest.approx(12.1)


def test_the_first_stage_holds_most_microbatches_and_so_fewer_units():
    units = [unit(saved_bytes=10) for _ in range(8)]
    limits = [StageLimit(memory_bytes=60, num_in_flight=count) for count in (2, 1)]
    found = split_stages(units, limits, 4)
    assert found is not None and found.num_units == (3, 5)


def test_hundreds_of_units_in_64_stages():
    units = [unit(forward_s=1 + place % 7 / 10, message_s=0.01 * (place % 5)) for place in range(300)]
    found = split_stages(units, roomy(64), 256)
    assert found is not None and len(found.num_units) == 64
    assert found.bottleneck_s >= sum(u.forward_s + u.backward_s for u in units) / 64


def test_more_stages_than_units_is_no_split():
    assert split_stages([unit()], roomy(2), 1) is None


def test_costs_that_cannot_be_are_refused():
    with pytest.raises(UsageError, match="cannot be"):
        split_stages([unit(forward_s=-1.0)], roomy(1), 1)
