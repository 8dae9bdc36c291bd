"""Pieces cover a step, each owned by the innermost unit that runs."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.pieces import cut_step
from memadvisor.run.records import Span
from tests.make_run import step

_TIMES = st.tuples(st.integers(0, 20), st.integers(1, 10))


@given(st.lists(st.tuples(st.sampled_from(["unit_forward", "unit_backward", "forward"]), _TIMES), max_size=8))
def test_pieces_cover_a_step_without_gap_or_overlap(spans):
    rows = [
        Span(0, kind, f"u{number}", 0, float(start), float(start + length))
        for number, (kind, (start, length)) in enumerate(spans)
    ]
    pieces = cut_step(rows, step(start_s=2.0, end_s=25.0, traced=True))

    assert (pieces[0].start_s, pieces[-1].end_s) == (2.0, 25.0)
    assert all(a.end_s == b.start_s for a, b in pairwise(pieces))


def test_the_innermost_unit_owns_its_time():
    """A root that calls a block: root, block, root again."""
    rows = [Span(0, "unit_forward", "", 0, 0.0, 3.0), Span(0, "unit_forward", "block", 0, 1.0, 2.0)]
    pieces = cut_step(rows, step(end_s=3.0, traced=True))

    assert [(piece.unit, piece.start_s, piece.end_s) for piece in pieces] == [
        ("", 0.0, 1.0),
        ("block", 1.0, 2.0),
        ("", 2.0, 3.0),
    ]


def test_what_a_unit_runs_again_itself_is_a_piece_of_its_backward():
    """Of a unit that checkpoints parts of itself, and only where it lies within the unit's own backward."""
    rows = [
        Span(0, "unit_forward", "a", 0, 0.0, 1.0),
        Span(0, "unit_backward", "b", 0, 1.0, 3.0),
        Span(0, "unit_recompute", "a", 0, 1.5, 2.0),
        Span(0, "unit_backward", "a", 0, 3.0, 6.0),
        Span(0, "unit_recompute", "a", 0, 4.0, 5.0),
    ]

    def cut(checkpointing):
        pieces = cut_step(rows, step(end_s=6.0, traced=True), checkpointing)
        return [(piece.phase, piece.unit, piece.start_s) for piece in pieces]

    earlier = [("forward", "a", 0.0), ("backward", "b", 1.0), ("recompute", "a", 1.5), ("backward", "b", 2.0)]
    assert cut({"a"}) == [*earlier, ("backward", "a", 3.0)]
    assert cut(()) == [*earlier, ("backward", "a", 3.0), ("recompute", "a", 4.0), ("backward", "a", 5.0)]
