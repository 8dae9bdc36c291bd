"""Piecewise alpha-beta fits: seconds of a message against its bytes, alpha + bytes / beta within each range of sizes.

One pair does not hold over six orders of magnitude: protocols and caches change in between. The fewest ranges are taken
whose largest relative residual is within a tenth, at most three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from memadvisor.hardware.hardware import LinkPiece

_MAX_PIECES = 3
_GOOD = 0.1  # the largest relative residual that needs no further piece
_LEAST_POINTS = 2


def fit_pieces(sizes_bytes: Sequence[int], durations_s: Sequence[float]) -> tuple[LinkPiece, ...]:
    """The fit of these points, whose sizes ascend; empty for fewer than two, which tell no slope."""
    count = len(sizes_bytes)
    best: tuple[LinkPiece, ...] = ()
    for number in range(1, _MAX_PIECES + 1):
        for ends in _partitions(count, number):
            pieces = tuple(
                _fit(sizes_bytes[start:end], durations_s[start:end])
                for start, end in zip((0, *ends), (*ends, count), strict=True)
            )
            if not best or _worst(pieces) < _worst(best):
                best = pieces
        if best and _worst(best) <= _GOOD:
            break
    return best


def _partitions(count: int, number: int) -> Iterator[tuple[int, ...]]:
    """Where to cut `count` points into so many ranges of at least two."""
    for ends in combinations(range(_LEAST_POINTS, count - _LEAST_POINTS + 1), number - 1):
        limits = (0, *ends, count)
        if all(end - start >= _LEAST_POINTS for start, end in pairwise(limits)):
            yield ends


def _worst(pieces: Sequence[LinkPiece]) -> float:
    return max(piece.residual_fraction for piece in pieces)


def _fit(sizes_bytes: Sequence[int], durations_s: Sequence[float]) -> LinkPiece:
    """Least squares of relative residuals; alpha is not negative, and a byte is not free."""
    points = list(zip(sizes_bytes, durations_s, strict=True))
    # Of (alpha + size * cost) / duration = 1: normal equations of two unknowns.
    aa = sum(1 / t**2 for _, t in points)
    as_ = sum(size / t**2 for size, t in points)
    ss = sum(size**2 / t**2 for size, t in points)
    a, s = sum(1 / t for _, t in points), sum(size / t for size, t in points)
    determinant = aa * ss - as_**2
    alpha_s, byte_s = (a * ss - s * as_) / determinant, (aa * s - as_ * a) / determinant
    if byte_s <= 0:
        # Larger messages took no longer: latency explains them, and the largest bounds what a byte costs.
        alpha_s, byte_s = 0.0, points[-1][1] / points[-1][0]
        alpha_s = max(0.0, min(t - size * byte_s for size, t in points))
    elif alpha_s < 0:
        alpha_s, byte_s = 0.0, s / ss
    residual = max(abs(alpha_s + size * byte_s - t) / t for size, t in points)
    return LinkPiece(
        from_bytes=sizes_bytes[0], alpha_s=alpha_s, bytes_per_s=1 / byte_s, residual_fraction=residual
    )
