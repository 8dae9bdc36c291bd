"""Fewer points for the eye, with every maximum kept exactly: a peak that a view loses is a wrong view."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memadvisor.analyzers.timeline import MemoryTimeline


def kept_indices(timeline: MemoryTimeline, num_bins: int) -> NDArray[np.intp]:
    """Which entries of the timeline to draw: all, or about four for each of `num_bins` stretches.

    Half of the stretches are equally long in time, for the whole picture, and half hold equally many entries,
    for who zooms into a burst. Of each the first and last entries, the one with most bytes and the one with
    fewest are kept, and of each category the one at which it is largest. So the drawn maximum of every stretch,
    of the whole and of each category is the recorded one.
    """
    total, times_s = timeline.total_bytes, timeline.times_s
    if len(total) <= 4 * num_bins:
        return np.arange(len(total))
    num_half = max(1, num_bins // 2)
    edges_s = np.linspace(times_s[0], times_s[-1], num_half + 1)[1:-1]
    in_time = np.concatenate(([0], np.searchsorted(times_s, edges_s), [len(total)]))
    in_number = np.linspace(0, len(total), num_half + 1).astype(np.intp)
    kept = {int(np.argmax(sizes)) for sizes in timeline.by_category_bytes.values()}
    for start, end in (*pairwise(np.unique(in_time)), *pairwise(np.unique(in_number))):
        stretch = total[start:end]
        kept |= {int(start), int(start + np.argmax(stretch)), int(start + np.argmin(stretch)), int(end - 1)}
    return np.array(sorted(kept))


def merged(intervals: Iterable[tuple[float, float]], smallest_gap: float) -> list[tuple[float, float]]:
    """Sorted intervals, with gaps closed that are too narrow to be seen."""
    rows: list[tuple[float, float]] = []
    for start, end in intervals:
        if rows and start - rows[-1][1] < smallest_gap:
            rows[-1] = (rows[-1][0], max(rows[-1][1], end))
        else:
            rows.append((start, end))
    return rows


def highest(values: Sequence[float], num_kept: int) -> list[int]:
    """Positions to draw of a long series: of each of `num_kept` stretches the one with the largest value."""
    if len(values) <= num_kept:
        return list(range(len(values)))
    edges = np.linspace(0, len(values), num_kept + 1).astype(int)
    pairs = pairwise(edges)
    return [int(start + np.argmax(np.asarray(values[start:end]))) for start, end in pairs]


def packed(values: NDArray[Any] | Sequence[float]) -> dict[str, str]:
    """Numbers as Plotly reads them from base64: all 64 bits of each, in a third of the space of digits."""
    return _in_base64(values, "f8")


def packed_places(values: NDArray[Any] | Sequence[float]) -> dict[str, str]:
    """Places along an axis, in half the space of `packed`: seven digits, finer than any screen."""
    return _in_base64(values, "f4")


def _in_base64(values: NDArray[Any] | Sequence[float], dtype: str) -> dict[str, str]:
    array = np.ascontiguousarray(values, dtype=f"<{dtype}")
    return {"dtype": dtype, "bdata": base64.b64encode(array.tobytes()).decode()}
