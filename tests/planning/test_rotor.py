"""Nested recomputation of chains, against an enumeration of all schedules that simulates memory and time."""

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.planning.rotor import Chain, ChainUnit, Stretch

SIZES = st.integers(0, 6)


@st.composite
def units(draw):
    """An output is part of what was saved, and of what a forward reaches; the rest is as it comes."""
    output, saved, extra = draw(SIZES), draw(SIZES), draw(SIZES)
    return output, ChainUnit(
        forward_s=float(draw(st.integers(1, 9))),
        input_bytes=0,
        saved_bytes=output + saved,
        plain_bytes=output + extra,
        saving_bytes=output + saved + draw(SIZES),
        backward_bytes=draw(SIZES),
        forward_level_bytes=draw(st.integers(10, 13)),
        backward_level_bytes=draw(st.integers(10, 16)),
    )


def chains(most):
    def joined(drawn):
        outputs = [0, *(output for output, _ in drawn)]
        return [
            ChainUnit(**{name: getattr(unit, name) for name in unit.__slots__} | {"input_bytes": taken})
            for taken, (_, unit) in zip(outputs, drawn, strict=False)
        ]

    return st.lists(units(), min_size=1, max_size=most).map(joined)


def brute_force(chain, budget, *, runs_ahead=False):
    """Least time of all forwards, by Dijkstra over what is in memory; None where no schedule fits.

    A state: units from `done` on are over; the inputs and the saved tensors that are kept, as bits; and the unit whose
    input has just been made and is kept by nobody, or -1. What is kept stays until its unit's backward. As in stretches,
    nothing runs again sooner than the next backward needs it, unless it `runs_ahead`.
    """
    count = len(chain)
    start = (count, 1, 0, -1)
    best, queue = {start: 0.0}, [(0.0, start)]
    while queue:
        time_s, state = heapq.heappop(queue)
        if time_s > best[state]:
            continue
        if state[0] == 0:
            return time_s
        done, _, saved, passing = state
        is_due = done < count and passing < 0 and saved >> (done - 1) & 1 and not runs_ahead
        for step_s, following, peak in [backward(chain, *state)] if is_due else moves(chain, *state):
            if peak <= budget and time_s + step_s < best.get(following, math.inf):
                best[following] = time_s + step_s
                heapq.heappush(queue, (time_s + step_s, following))
    return None


def moves(chain, done, inputs, saved, passing):
    """Seconds, next state and highest bytes of everything that may be done next."""
    count = len(chain)
    kept = kept_bytes(chain, inputs, saved)

    def level(k):
        return chain[k].forward_level_bytes if done == count else chain[done - 1].backward_level_bytes

    if passing >= 0:
        yield 0.0, (done, inputs, saved, -1), 0  # let go of it
        yield 0.0, (done, inputs | 1 << passing, saved, -1), 0
    for k in range(done):
        is_kept = inputs >> k & 1 or (k and saved >> (k - 1) & 1)
        if not is_kept and passing != k:
            continue
        own = 0 if is_kept else chain[k].input_bytes
        if k + 1 < done:  # what follows a forward that keeps nothing is the next one
            yield (
                chain[k].forward_s,
                (done, inputs, saved, k + 1),
                level(k) + kept + own + chain[k].plain_bytes,
            )
        if is_kept and not saved >> k & 1:
            peak = level(k) + kept + chain[k].saving_bytes
            yield chain[k].forward_s, (done, inputs, saved | 1 << k, -1), peak
    if saved >> (done - 1) & 1 and passing < 0:
        yield backward(chain, done, inputs, saved, passing)


def backward(chain, done, inputs, saved, passing):
    """The same of the last unit's backward."""
    last = done - 1
    kept = kept_bytes(chain, inputs, saved)
    peak = chain[last].backward_level_bytes + kept + chain[last].backward_bytes
    return 0.0, (last, inputs & ~(1 << last), saved & ~(1 << last), -1), peak


def kept_bytes(chain, inputs, saved):
    kept = sum(u.input_bytes for k, u in enumerate(chain) if k and inputs >> k & 1)
    return kept + sum(u.saved_bytes for k, u in enumerate(chain) if saved >> k & 1)


def play(chain, body):
    """Time and peak of a schedule made of stretches, played item by item."""
    peak, time_s = 0, 0.0

    def reach(size):
        nonlocal peak
        peak = max(peak, size)

    def forward(body, kept, last):
        """Run a body; returns its items with what is kept beside each in the backward."""
        nonlocal time_s
        begins = True
        items = []
        for item in body:
            first = item.first if isinstance(item, Stretch) else item
            # The chain's or stretch's own input is counted already, an output of what was kept too.
            if not begins and isinstance(items[-1][0], Stretch):
                kept += chain[first].input_bytes
            begins = False
            items.append((item, kept))
            for k in range(item.first, item.last + 1) if isinstance(item, Stretch) else [item]:
                u = chain[k]
                level = u.forward_level_bytes if last == len(chain) - 1 else chain[last].backward_level_bytes
                time_s += u.forward_s
                if isinstance(item, Stretch):
                    reach(level + kept + (u.input_bytes if k > first else 0) + u.plain_bytes)
                else:
                    reach(level + kept + u.saving_bytes)
                    kept += u.saved_bytes
        return items

    def backward(items):
        for item, kept in reversed(items):
            if isinstance(item, Stretch):
                backward(forward(item.body, kept, item.last))
            else:
                u = chain[item]
                reach(u.backward_level_bytes + kept + u.saved_bytes + u.backward_bytes)

    backward(forward(body, 0, len(chain) - 1))
    return time_s, peak


def exact(chain, budget):
    return Chain(chain, budget, num_slots=budget)


def compare(chain, share, *, runs_ahead):
    high = play(chain, tuple(range(len(chain))))[1]
    budget = max(1, round(share * high))
    body = exact(chain, budget).body(budget)
    least_s = brute_force(chain, budget, runs_ahead=runs_ahead)

    assert (body is None) == (least_s is None)
    if body is not None:
        time_s, peak = play(chain, body)
        assert peak <= budget
        assert time_s == least_s


@given(chains(6), st.floats(0.3, 1))
@settings(max_examples=150, deadline=None)
def test_no_schedule_of_a_short_chain_is_faster(chain, share):
    compare(chain, share, runs_ahead=True)


@given(chains(9).filter(lambda chain: len(chain) > 6), st.floats(0.4, 1))
@settings(max_examples=3, deadline=None)
def test_no_schedule_of_up_to_nine_units_is_faster(chain, share):
    compare(chain, share, runs_ahead=False)


def test_one_that_runs_again_sooner_than_a_backward_needs_it_may_be_faster():
    """A backward that holds more than the one before it: what it needs is made again before that one, where there is room.
    No stretch does that. Drawn once in some thousands of chains of seven to nine units, of up to six never."""
    sizes = [
        (0, 0, 0, 0, 0, 10, 10), (0, 6, 0, 6, 0, 10, 10), (0, 8, 2, 8, 0, 10, 10), (2, 9, 4, 9, 0, 10, 10),
        (4, 5, 5, 5, 0, 10, 10), (5, 0, 0, 0, 0, 10, 15), (0, 0, 0, 0, 0, 10, 10), (0, 9, 3, 9, 0, 10, 10),
        (3, 0, 1, 0, 1, 10, 13),
    ]  # fmt: skip
    chain = [
        ChainUnit(forward_s=1.0, **dict(zip(ChainUnit.__slots__[1:], each, strict=True))) for each in sizes
    ]
    assert play(chain, exact(chain, 21).body(21))[0] == brute_force(chain, 21) == 21
    assert brute_force(chain, 21, runs_ahead=True) == 20


def policies(count):
    """Every unit alone a stretch but the last one, every k-th keeping all, and stretches of about sqrt(n)."""
    yield (*(Stretch(k, k, (k,)) for k in range(count - 1)), count - 1)
    for stride in range(2, count):
        yield tuple(
            k if (k + 1) % stride == 0 or k == count - 1 else Stretch(k, k, (k,)) for k in range(count)
        )
    length = max(1, round(math.sqrt(count)))
    starts = range(0, count - 1, length)
    ends = [min(start + length, count - 1) for start in starts]
    yield (*(Stretch(s, e - 1, tuple(range(s, e))) for s, e in zip(starts, ends, strict=True)), count - 1)


def greedy(chain, budget):
    """Units alone, those first that free most bytes a second, until it fits."""
    count = len(chain)
    order = sorted(range(count - 1), key=lambda k: -chain[k].saved_bytes / chain[k].forward_s)
    for taken in range(count):
        body = tuple(Stretch(k, k, (k,)) if k in order[:taken] else k for k in range(count))
        if play(chain, body)[1] <= budget:
            break
    return body


@given(chains(16), st.floats(0.2, 1))
@settings(max_examples=40, deadline=None)
def test_never_slower_than_every_layer_strides_square_roots_and_greed(chain, share):
    budget = max(1, round(share * play(chain, tuple(range(len(chain))))[1]))
    table = exact(chain, budget)
    body = table.body(budget)
    for other in (*policies(len(chain)), greedy(chain, budget)):
        time_s, peak = play(chain, other)
        if peak <= budget:
            assert body is not None
            assert play(chain, body)[0] <= time_s


@given(chains(12), st.integers(20, 60))
@settings(max_examples=40, deadline=None)
def test_what_fits_in_slots_fits_in_bytes_and_more_memory_is_never_slower(chain, num_slots):
    high = play(chain, tuple(range(len(chain))))[1]
    table = Chain(chain, high, num_slots)
    found = [play(chain, table.body(budget))[0] for budget in table.budgets()]

    assert found == sorted(set(found))
    for budget in range(0, high + 1, max(1, high // 7)):
        body = table.body(budget)
        assert body is None or play(chain, body)[1] <= budget


def test_of_a_long_even_chain_little_memory_takes_nested_stretches():
    """96 units that save 10 for an input of 1: in the room of 30, stretches within stretches."""
    unit = ChainUnit(
        forward_s=1.0, input_bytes=1, saved_bytes=10, plain_bytes=2, saving_bytes=10, backward_bytes=2
    )
    table = Chain([unit] * 96, 960)
    body = table.body(30)
    time_s, peak = play([unit] * 96, body)

    assert peak <= 30
    assert any(
        isinstance(inner, Stretch) for item in body if isinstance(item, Stretch) for inner in item.body
    )
    assert time_s < 5 * 96


def test_nothing_fits_in_nothing():
    unit = ChainUnit(
        forward_s=1.0, input_bytes=1, saved_bytes=10, plain_bytes=2, saving_bytes=10, backward_bytes=2
    )
    assert Chain([unit] * 3, 5).body(5) is None
    assert Chain([unit] * 3, 100).body(0) is None


@pytest.mark.parametrize("count", [1, 2])
def test_with_all_memory_everything_is_kept(count):
    unit = ChainUnit(
        forward_s=1.0, input_bytes=1, saved_bytes=10, plain_bytes=2, saving_bytes=10, backward_bytes=2
    )
    assert Chain([unit] * count, 1000).body(1000) == tuple(range(count))
