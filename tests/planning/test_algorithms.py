"""Algorithms of collectives are chosen by what was measured, and prediction and plan say the same."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.collectives import curve_seconds
from memadvisor.executors import Algorithm, algorithm_for
from memadvisor.hardware.hardware import CollectiveCurve
from memadvisor.planning.advise import advise
from memadvisor.planning.algorithms import algorithms_notes, choose_algorithms
from tests.planning.test_advise import MEASURED, RUN

SIZES = (2**12, 2**16, 2**20, 2**24)
DURATIONS = st.tuples(*[st.floats(1e-5, 1.0)] * len(SIZES)).map(sorted).map(tuple)


def hardware_of(usual, doubling):
    """Gathers among four ranks."""
    curve = CollectiveCurve(operation="all_gather", num_ranks=4, sizes_bytes=SIZES, durations_s=usual)
    rest = tuple(
        replace(each, num_ranks=4) for each in MEASURED.collectives if each.operation != "all_gather"
    )
    other = replace(curve, durations_s=doubling, algorithm="doubling")
    return replace(MEASURED, collectives=(*rest, curve), alternatives=(other,))


def test_reductions_go_at_once_where_that_is_faster_and_their_parts_are_no_burden():
    rest = tuple(replace(each, num_ranks=4) for each in MEASURED.collectives)
    usual = next(each for each in rest if each.operation == "reduce_scatter")
    together = replace(usual, durations_s=(1e-6,), algorithm="together")
    hardware = replace(MEASURED, collectives=rest, alternatives=(together,))

    assert [(a.min_bytes, a.name) for a in choose_algorithms(hardware, 4)] == [
        (0, "together"),
        (2**22, "pairwise"),
    ]


@given(DURATIONS, DURATIONS)
def test_at_each_measured_size_another_algorithm_is_taken_where_it_saves_a_tenth(usual, doubling):
    hardware = hardware_of(usual, doubling)
    chosen = choose_algorithms(hardware, 8)
    assert choose_algorithms(hardware, 2) == ()
    for size_bytes, plain_s, other_s in zip(SIZES, usual, doubling, strict=True):
        name = algorithm_for(chosen, "all_gather", size_bytes, 4)
        assert (name == "doubling") == (other_s <= 0.9 * plain_s)
        assert algorithm_for(chosen, "all_gather", size_bytes, 8) is None
        assert algorithm_for(chosen, "all_reduce", size_bytes, 4) is None


def test_small_sums_share_a_message_where_one_of_twice_the_size_saves_a_tenth_of_two():
    """Here up to the second measured size: the third takes twice as long as half of it."""
    curve = CollectiveCurve(
        operation="all_reduce", num_ranks=4, sizes_bytes=SIZES, durations_s=(1e-3, 1.2e-3, 2e-2, 4e-1)
    )
    hardware = replace(MEASURED, collectives=(curve,))

    chosen = choose_algorithms(hardware, 4)
    assert [(a.min_bytes, a.name) for a in chosen] == [(0, "merged"), (2**16, "native")]
    assert choose_algorithms(hardware, 2) == ()
    assert [note for note in algorithms_notes(chosen) if "below 64.0 KiB" in note] == list(
        algorithms_notes(chosen)
    )


def test_nothing_is_chosen_where_nothing_else_was_measured():
    assert choose_algorithms(None, 4) == choose_algorithms(MEASURED, 4) == ()
    assert advise(RUN, memory_bytes=10**9, hardware=MEASURED).plans[0].plan.algorithms == ()


def test_advice_writes_what_it_has_chosen_and_predicts_by_it():
    slow = (1e-2, 1e-2, 1e-2, 2e-2)
    fast = tuple(seconds / 10 for seconds in slow[:2]) + slow[2:]
    plain, chosen = (
        advise(RUN, memory_bytes=2 * 10**6, num_ranks=4, hardware=hardware)
        for hardware in (replace(hardware_of(slow, fast), alternatives=()), hardware_of(slow, fast))
    )

    assert plain.plans[0].plan.algorithms == ()
    assert [(a.min_bytes, a.name) for a in chosen.plans[0].plan.algorithms] == [
        (0, "doubling"),
        (2**20, "pairwise"),
    ]
    assert chosen.plans[0].prediction.step_time_s < plain.plans[0].prediction.step_time_s
    assert any("by doubling" in note for note in chosen.notes)
    assert curve_seconds(hardware_of(slow, fast).alternatives[0], 2**12) == 1e-3


def test_a_note_ends_where_the_same_collective_goes_otherwise():
    """Not where another one begins to."""
    gathers = Algorithm(operation="all_gather", min_bytes=0, name="doubling", num_ranks=4)
    sums = replace(gathers, operation="reduce_scatter", min_bytes=2**16, name="together")
    usual = replace(sums, min_bytes=2**22, name="pairwise")

    first, second = algorithms_notes((gathers, sums, usual))
    assert first.startswith("Each all_gather among 4 ranks goes by doubling")
    assert second.startswith(
        "Each reduce_scatter of 64.0 KiB and more below 4.00 MiB among 4 ranks goes by together"
    )
