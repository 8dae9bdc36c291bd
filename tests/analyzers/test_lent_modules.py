"""Modules that one unit holds and another calls."""

from dataclasses import replace

from memadvisor.analyzers.lent_modules import in_order_of_own_calls, lenders, with_saved_by_callers
from memadvisor.analyzers.pieces import cut_step
from tests.make_run import make_run


def test_a_unit_lends_what_others_run_of_it_inside_their_own_passes():
    """Not what runs outside of units, nor what is of none, nor its own."""
    rank = make_run(num_blocks=3).ranks[0]
    pieces = cut_step(rank.spans, rank.traced_step)
    places = {(piece.unit, piece.phase): n for n, piece in enumerate(pieces) if piece.micro_batch == 0}
    names = {unit.name for unit in rank.units}
    operator = rank.operators[0]

    def at(place, unit):
        middle_s = (pieces[place].start_s + pieces[place].end_s) / 2
        return replace(operator, start_s=middle_s, end_s=middle_s, unit=unit)

    forward, backward = places["blocks.2", "forward"], places["blocks.1", "backward"]
    optimizer = next(n for n, piece in enumerate(pieces) if piece.phase == "optimizer")
    rows = [
        *(at(forward, unit) for unit in ("blocks.0", "blocks.2", "blocks.1", "blocks.0", "other")),
        at(backward, "blocks.0"),
        at(optimizer, "blocks.0"),
    ]
    found = lenders(replace(rank, operators=tuple(rows)), pieces, names)

    assert {n: each for n, each in enumerate(found) if each} == {
        forward: ("blocks.0", "blocks.1"),
        backward: ("blocks.0",),
    }


def test_what_a_lent_module_saves_is_the_units_that_calls_it():
    """Not what is saved outside of units, nor what is of none."""
    rank = make_run(num_blocks=3).ranks[0]
    pieces = cut_step(rank.spans, rank.traced_step)
    names = {unit.name for unit in rank.units}
    middles = [(piece, (piece.start_s + piece.end_s) / 2) for piece in pieces]
    rows = [
        replace(rank.saved[0], unit=unit, saved_s=middle_s)
        for _, middle_s in middles
        for unit in ("blocks.0", "other")
    ]
    found = with_saved_by_callers(replace(rank, saved=tuple(rows)), pieces, names).saved

    assert [row.unit for row in found[1::2]] == ["other"] * len(pieces)
    for (piece, _), row in zip(middles, found[::2], strict=True):
        is_caller = piece.unit and piece.phase in ("forward", "recompute")
        assert row.unit == (piece.unit if is_caller else "blocks.0")


def test_units_are_ordered_by_calls_that_are_not_lent():
    """What is lent alone comes first; what is called by itself too comes where it is."""
    rank = make_run(num_blocks=3).ranks[0]
    pieces = cut_step(rank.spans, rank.traced_step)
    names = [unit.name for unit in rank.units]
    alone = replace(rank.units[0], name="alone")
    last = next(unit for unit in rank.units if unit.name == "blocks.2")
    units = [last, *(unit for unit in rank.units if unit is not last), alone]
    lent = [("alone", "blocks.2"), *((),) * (len(pieces) - 1)]

    assert [unit.name for unit in in_order_of_own_calls(units, pieces, lent)] == ["alone", *names]
    assert in_order_of_own_calls(rank.units, pieces, [()] * len(pieces)) == rank.units
