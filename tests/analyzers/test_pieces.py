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
