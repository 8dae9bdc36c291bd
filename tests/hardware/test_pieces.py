"""Piecewise alpha-beta fits: exact where the law holds, and honest about where it does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.hardware.pieces import fit_pieces

SIZES = tuple(2**power for power in range(12, 28, 2))


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_one_law_gives_one_piece_with_its_own_figures(alpha_s, rate):
    (piece,) = fit_pieces(SIZES, [alpha_s + size / rate for size in SIZES])

    assert piece.residual_fraction < 1e-6
    for size in (SIZES[0], SIZES[-1]):
        assert piece.alpha_s + size / piece.bytes_per_s == pytest.approx(alpha_s + size / rate, rel=1e-4)


def test_where_the_law_changes_another_piece_begins():
    """A protocol for small messages and one for large: 0.1 ms + 1 GB/s up to 256 KiB, then 2 ms + 0.2 GB/s."""
    durations = [1e-4 + size / 1e9 if size < 2**19 else 2e-3 + size / 2e8 for size in SIZES]
    small, large = fit_pieces(SIZES, durations)

    assert large.from_bytes == 2**20
    assert (small.bytes_per_s, large.bytes_per_s) == pytest.approx((1e9, 2e8))


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8))
def test_the_residual_is_the_largest_of_the_points_and_no_byte_is_free(durations):
    sizes = SIZES[: len(durations)]
    pieces = fit_pieces(sizes, durations)
    assert [piece.from_bytes for piece in pieces] == sorted({piece.from_bytes for piece in pieces})
    for size, duration_s in zip(sizes, durations, strict=True):
        piece = max((p for p in pieces if p.from_bytes <= size), key=lambda p: p.from_bytes)
        assert piece.alpha_s >= 0 and piece.bytes_per_s > 0
        error = abs(piece.alpha_s + size / piece.bytes_per_s - duration_s) / duration_s
        assert error <= piece.residual_fraction + 1e-9


def test_one_point_tells_no_slope():
    assert fit_pieces((4096,), (1e-3,)) == ()
