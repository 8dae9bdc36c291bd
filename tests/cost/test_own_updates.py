"""What an optimizer's step allocates for some units alone."""

from fractions import Fraction

from memadvisor.cost.own_updates import OwnUpdates, UpdateChanges

# Two units' temporaries of 60 and 30 bytes, which are there at once, after a constant of 8; then another of the first's.
TOGETHER = UpdateChanges(
    own={"a": ((1, 60), (3, -60), (5, 40), (6, -40)), "b": ((2, 30), (4, -30))},
    anyones=((0, 8), (7, -8)),
    untold=(),
    highest_bytes=98,
)


def test_a_units_share_is_what_its_own_parameters_had_and_what_every_update_has():
    own = OwnUpdates({3: TOGETHER})
    assert own.share(("a",), 3, 0.5) == Fraction(68, 98)
    assert own.share(("b",), 3, 0.5) == Fraction(38, 98)
    assert own.share(("a", "b"), 3, 1.0) == 1
    assert own.share(("of another optimizer",), 3, 0.5) == Fraction(8, 98)


def test_of_several_optimizer_steps_each_has_its_own():
    """The second updates `b` alone: its share there is all."""
    second = UpdateChanges(own={"b": ((0, 20), (1, -20))}, anyones=(), untold=(), highest_bytes=20)
    own = OwnUpdates({3: TOGETHER, 5: second})
    assert own.share(("b",), 5, 0.5) == 1
    assert own.share(("a",), 5, 0.5) == 0
    assert own.share(("b",), None, 0.5) == 1


def test_what_is_for_nobody_knows_whom_is_taken_as_the_share_of_all():
    changes = UpdateChanges(own={}, anyones=(), untold=((0, 100), (1, -100)), highest_bytes=100)
    assert OwnUpdates({0: changes}).share(("a",), 0, 0.25) == Fraction(1, 4)


def test_without_temporaries_there_is_no_share():
    assert OwnUpdates({}).share(("a",), 0, 0.5) is None
