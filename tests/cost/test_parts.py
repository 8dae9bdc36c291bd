"""What units with parts have at their highest instants, by hand."""

import math

from memadvisor.cost.parts import Change, Part, PartedPass, PartStorage
from memadvisor.cost.second_run import SecondRun

FORWARD, LOSS, BACKWARD = 0, 1, 2


def storage(number, size_bytes, unsaved):
    return PartStorage(
        number=number,
        category="activation",
        size_bytes=size_bytes,
        unsaved=unsaved,
        death_segment=BACKWARD,
    )


# A part keeps an activation of 30 bytes, and a weight of 8 that autocast has cast.
PART = Part(
    modules=("u.a",),
    storages=(storage(0, 30, (FORWARD, 3.0)), storage(1, 8, (LOSS, math.inf))),
    asked_s=11.0,
    over_s=13.0,
    start_s=1.0,
    saved_s=2.0,
    growth={"activation": 38},
    put_back=(Change(1.0, 5, "temporary"),),
    run=SecondRun(whole_s=1.0, until_saved_s=1.0, num_saved=2, num_calls=1),
)
KEPT = (Change(2.0, 30, "activation"), Change(2.0, 8, "activation"))


def parted(own=()):
    return PartedPass(
        unit="u", forward=FORWARD, backward=BACKWARD, parts=(PART,), own=own, random_state_bytes=5
    )


def test_what_a_part_keeps_goes_at_its_last_use_and_copies_of_weights_stay_with_autocast():
    events = (*KEPT, Change(4.0, 35, "activation"))
    assert parted().forward_peak({}, events) == {"activation": 8 + 35, "temporary": 5}
    assert parted(events).growth() == parted().forward_peak({}, events)


def test_a_generators_state_is_kept_from_the_call_on():
    before = (Change(0.5, 42, "temporary"), Change(0.6, -42, "temporary"))
    assert parted().forward_peak({}, (*before, *KEPT)) == {"activation": 38, "temporary": 5}


def test_a_generators_state_goes_with_what_autograd_keeps_of_the_part():
    """Beside it, while the part runs again, is the state that the run has found."""
    events = (Change(12.0, -38, "activation"), Change(14.0, 47, "temporary"))
    assert parted().backward_peak({"activation": 38}, events) == {"activation": 38, "temporary": 10}
