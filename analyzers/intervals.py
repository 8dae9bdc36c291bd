"""Sets of moments: sorted, disjoint intervals [start, end), and what can be asked of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Intervals = tuple[tuple[float, float], ...]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """All moments in any of the intervals; empty and reversed ones hold none."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def minus(left: Intervals, right: Intervals) -> Intervals:
    """The moments of `left` that are not in `right`; both as `union` gives them."""
    rest: list[tuple[float, float]] = []
    first = 0
    for start, end in left:
        while first < len(right) and right[first][1] <= start:
            first += 1
        position = first
        while position < len(right) and right[position][0] < end:
            if right[position][0] > start:
                rest.append((start, right[position][0]))
            start = max(start, right[position][1])
            position += 1
        if start < end:
            rest.append((start, end))
    return tuple(rest)


def holds(intervals: Intervals, moment: float) -> bool:
    """Whether one of the intervals, as `union` gives them, holds the moment."""
    position = bisect_right(intervals, moment, key=lambda interval: interval[0]) - 1
    return position >= 0 and moment < intervals[position][1]


def length(intervals: Sequence[tuple[float, float]]) -> float:
    """Total length of disjoint intervals."""
    return sum((end - start for start, end in intervals), 0.0)
