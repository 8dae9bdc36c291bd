"""What a run of a stretch runs and keeps, on the example 0..5 with 0..3, 1..2 and 5 inside."""

from memadvisor.cost.stretches import Stretches

OUTER, INNER, INMOST, LAST = tuple("012345"), tuple("0123"), tuple("12"), ("5",)
FAMILY = Stretches([INMOST, OUTER, LAST, INNER])


def test_a_unit_belongs_to_the_innermost_stretch_around_it():
    assert FAMILY.around("1") == [OUTER, INNER, INMOST]
    assert FAMILY.around("3") == [OUTER, INNER]
    assert FAMILY.around("6") == [] and "6" not in FAMILY


def test_a_body_is_of_units_that_keep_all_and_of_inner_stretches():
    assert FAMILY.body(OUTER) == [INNER, ("4",), LAST]
    assert FAMILY.body(INNER) == [("0",), INMOST, ("3",)]
    assert [FAMILY.keeps_all(item, OUTER) for item in FAMILY.body(OUTER)] == [False, True, False]
    assert FAMILY.keeps_all(LAST, LAST)


def test_an_inner_stretch_at_the_end_runs_by_itself_and_after_the_outer_one():
    assert FAMILY.runs(OUTER) == [INNER, ("4",)]
    assert FAMILY.ending("5") == [OUTER, LAST]


def test_families_are_equal_whatever_the_order():
    assert Stretches([INNER, INMOST, LAST, OUTER]) == FAMILY
    assert not FAMILY.are_alone and Stretches.alone("ab").are_alone
