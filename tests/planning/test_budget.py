"""The memory that plans are for: as it is asked for, or what is left of the card that the run was recorded on."""

import pytest

from memadvisor.cost.allocator_settings import MIB
from memadvisor.planning.budget import budget_bytes, card_notes
from memadvisor.units import GIB
from tests.cuda_run import cuda_run
from tests.make_run import make_run

CARD = 8 * GIB  # of the synthetic runs
OUTSIDE = 500 * MIB


def on_a_card(outside_bytes=OUTSIDE):
    reserved = cuda_run().ranks[0].allocator_states[0].reserved_bytes
    used = None if outside_bytes is None else reserved + outside_bytes
    return cuda_run(state={"process_used_bytes": used})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("7GiB", 7 * GIB),
        ("8GiB", CARD - OUTSIDE),  # its context and NCCL's buffers are there too
        ("8.3GiB", CARD - OUTSIDE),  # the number in a card's name is larger than what its driver has
        ("12GiB", 12 * GIB),  # another card
    ],
)
def test_of_the_runs_own_card_what_is_left_is_planned_for(asked, expected):
    assert budget_bytes(asked, on_a_card()) == expected


def test_on_a_cpu_and_as_a_share_of_the_peak_a_budget_is_what_was_asked_for():
    run = make_run(num_ranks=1)
    assert budget_bytes("8GiB", run) == CARD
    peak = on_a_card().ranks[0].traced_step.peak_allocated_bytes
    assert budget_bytes("60%", on_a_card()) == int(peak * 0.6)


def test_what_nvml_did_not_count_is_not_made_up():
    run = on_a_card(outside_bytes=None)
    assert budget_bytes("8.1GiB", run) == CARD
    assert list(card_notes(run, CARD)) == [
        "The budget is what is left to the allocator of the card's 8.00 GiB: what the CUDA context and NCCL take was not "
        "recorded, and comes off it."
    ]


def test_it_is_said_where_the_budget_is_what_is_left():
    run = on_a_card()
    assert list(card_notes(run, budget_bytes("8GiB", run))) == [
        "The budget is what is left to the allocator of the card's 8.00 GiB: the CUDA context and NCCL took 500 MiB of it "
        "(measured)."
    ]
    assert list(card_notes(run, budget_bytes("7GiB", run))) == []
    assert list(card_notes(make_run(num_ranks=1), CARD)) == []
