"""Listening to modules is paid for out of a hundredth of the training's time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.capture import listening as module
from memadvisor.capture.listening import BUDGET, NUM_FIRST, Listening

NUM_COMPARED = 8


def train(listening, lengths_s, cost_s, estimate_s=None):
    """Steps of these lengths, and `cost_s` more where they are listened to; which ones are."""
    full = []
    for index, length_s in enumerate(lengths_s):
        if listening.wants(index):
            full.append(index)
            listening.note_full(
                length_s + cost_s, length_s + cost_s, cost_s / 3 if estimate_s is None else estimate_s
            )
        else:
            listening.note_thin(length_s, length_s)
    return full


@settings(deadline=None)
@given(st.floats(0.02, 3), st.floats(1e-4, 10), st.integers(0, 500))
def test_after_the_first_steps_a_dear_model_is_listened_to_for_its_share_of_the_time(
    share, step_s, num_steps
):
    lengths_s = [step_s] * num_steps
    full = train(Listening(), lengths_s, share * step_s)
    later = [index for index in full if index >= NUM_FIRST]

    assert full[:NUM_FIRST] == list(range(min(num_steps, NUM_FIRST)))
    assert len(later) * share * step_s <= 1.01 * BUDGET * sum(lengths_s)
    num_paying = max(0, num_steps - NUM_FIRST - NUM_COMPARED)
    assert len(later) >= num_paying // (share // BUDGET + 2)


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_the_budget_holds_for_steps_of_any_length(seed):
    chance = random.Random(seed)
    lengths_s = [chance.choice((0.001, 0.002, 0.1, 60)) for _ in range(500)]
    listening = Listening()
    full = train(listening, lengths_s, 0.0005)

    # What is measured by comparison may be too much, by steps of other lengths, but is never less than twice
    # the estimate, which is two thirds of it.
    later = [index for index in full if index >= NUM_FIRST]
    dear = [index for index in later if index - 1 not in full]
    assert len(dear) * 0.0005 * 2 / 3 <= BUDGET * sum(lengths_s)


def test_a_step_of_few_calls_is_not_charged_what_listening_took_in_the_one_before_it():
    listening = Listening()
    listening.note_full(0.090, 0.090, 0.006)  # a hundred actions were asked for

    assert listening.took_s(0.0002) == pytest.approx(0.0002)


def test_what_listening_took_is_as_much_above_its_estimate_as_the_comparison_found():
    listening = Listening()
    train(listening, [0.010] * (NUM_FIRST + NUM_COMPARED), 0.003, estimate_s=0.001)

    assert listening.took_s(0.001) == pytest.approx(0.003)
    assert listening.took_s(0.010) == pytest.approx(0.030)


def test_a_long_pause_is_not_followed_by_many_dear_steps():
    listening = Listening()
    lengths_s = [0.001] * 50 + [600.0] + [0.001] * 50
    full = train(listening, lengths_s, 0.0005)

    assert [index for index in full if index > 50] == [51]


def test_a_step_that_earns_its_cost_is_always_listened_to():
    assert train(Listening(), [0.1] * 100, 0.0004) == list(range(100))
    # The estimate is worth a comparison, and what that tells is still within the budget.
    found = train(Listening(), [0.1] * 100, 0.00045, estimate_s=0.0002)
    assert found == [*range(NUM_FIRST), *range(NUM_FIRST + NUM_COMPARED, 100)]


class Clock:
    """Steps of ten milliseconds, and three more in those that are listened to, of which the thread is at work throughout."""

    def __init__(self):
        self.now_s = 0.0
        self.num_busy_readings = 0

    def monotonic(self):
        return self.now_s

    def thread_time(self):
        self.num_busy_readings += 1
        return self.now_s


def test_how_long_the_thread_was_at_work_is_asked_in_one_of_eight_steps_that_nobody_listens_to(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    listening, full, by_step = Listening(), [], []
    is_full = True
    for index in range(1, 1001):
        clock.now_s += 0.013 if is_full else 0.010
        before = clock.num_busy_readings
        is_full = listening.turn_to(index, was_full=is_full, estimate_s=0.001, must=False)
        by_step.append(clock.num_busy_readings - before)
        full += [index] if is_full else []

    assert listening.cost_s == pytest.approx(0.003)  # as if each had been asked
    assert [index for index in full if index < NUM_FIRST] == list(range(1, NUM_FIRST))
    num_later = len(full) - NUM_FIRST + 1
    assert num_later >= 10 and num_later * 0.003 <= 1.01 * BUDGET * clock.now_s
    assert sum(by_step[100:]) <= 2 / 8 * 900 + 2 * num_later


def test_a_step_whose_length_tells_nothing_is_in_no_account(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    listening = Listening()
    listening.turn_to(1, was_full=True, estimate_s=0.0, must=False)
    clock.now_s += 60

    assert listening.turn_to(2, was_full=None, estimate_s=1.0, must=True)
    assert listening.cost_s == 0
