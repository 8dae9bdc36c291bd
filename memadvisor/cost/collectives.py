"""How long a collective takes: by formula, by measured curve, or fitted to what a run recorded.

Sizes are full message sizes: the gathered tensor of an all_gather, the input of a reduce_scatter, else
the tensor itself. alpha is the cost of one message in seconds, beta a link's rate in bytes per second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from memadvisor.hardware.hardware import CollectiveCurve, EngineCost, OverlapSlowdown

# Rounds of (n-1) messages of 1/n of the tensor that a ring needs (Thakur, Rabenseifner and Gropp 2005,
# "Optimization of collective communication operations in MPICH", sections 4 and 5).
RING_ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_reduce": 2}


def ring_seconds(
    operation: str, size_bytes: float, num_ranks: int, alpha_s: float, beta_bytes_per_s: float
) -> float:
    """Ring all-gather and reduce-scatter take (n-1) alpha + (n-1)/n S/beta, an all-reduce twice that."""
    if num_ranks == 1:
        return 0.0
    one_round = (num_ranks - 1) * (alpha_s + size_bytes / num_ranks / beta_bytes_per_s)
    return RING_ROUNDS[operation] * one_round


def ring_bytes(operation: str, size_bytes: float, num_ranks: int) -> float:
    """What each rank sends in a ring; pairwise exchange sends as much."""
    return RING_ROUNDS[operation] * size_bytes * (num_ranks - 1) / num_ranks


def tree_all_reduce_seconds(
    size_bytes: float, num_ranks: int, alpha_s: float, beta_bytes_per_s: float
) -> float:
    """A pipelined double tree: 2 log2(n) alpha + 2 S/beta (Sanders, Speck and Traeff 2009)."""
    if num_ranks == 1:
        return 0.0
    rounds = (num_ranks - 1).bit_length()
    return 2 * rounds * alpha_s + 2 * size_bytes / beta_bytes_per_s


def curve_seconds(curve: CollectiveCurve, size_bytes: float) -> float:
    """Piecewise linear in bytes between the measured points.

    Below the first point its duration stands (latency); above the last the slope of the last two goes
    on, and a single point scales with its size.
    """
    sizes, durations = curve.sizes_bytes, curve.durations_s
    if size_bytes <= sizes[0]:
        return durations[0]
    if len(sizes) == 1:
        return durations[0] * size_bytes / sizes[0]
    right = min(bisect_right(sizes, size_bytes), len(sizes) - 1)
    left = right - 1
    slope = (durations[right] - durations[left]) / (sizes[right] - sizes[left])
    if size_bytes > sizes[-1]:
        slope = max(slope, durations[-1] / sizes[-1] / 2)  # noise must not make big messages free
    return durations[left] + slope * (size_bytes - sizes[left])


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One collective that a run timed: its full message and its own duration, waiting for peers excluded."""

    operation: str
    num_ranks: int
    size_bytes: int
    duration_s: float


def fit_ring(observations: Sequence[Observation]) -> tuple[float, float] | None:
    """(alpha, beta) of the ring that fits the observations best in the sense of least relative squares.

    None when there is nothing to fit. With one message size alone, all of its time is taken as bandwidth.
    """
    rows: list[tuple[float, float, float]] = []
    for seen in observations:
        rounds = RING_ROUNDS.get(seen.operation)
        if rounds is None or seen.num_ranks < 2 or seen.size_bytes <= 0 or seen.duration_s <= 0:
            continue
        messages = rounds * (seen.num_ranks - 1)
        rows.append((messages, messages * seen.size_bytes / seen.num_ranks, seen.duration_s))
    if not rows:
        return None
    alpha_s, per_byte_s = _least_relative_squares(rows)
    if alpha_s > 0 and per_byte_s <= 0:
        # Small messages took as long as large ones: latency explains them, and the largest one alone bounds
        # what a byte costs. A small one's bandwidth would make a large message absurdly slow.
        _, volume, duration = max(rows, key=lambda row: row[1])
        weights = [row[0] / row[2] for row in rows]
        return sum(weights) / sum(weight * weight for weight in weights), volume / duration
    if alpha_s < 0 or per_byte_s <= 0:
        alpha_s = 0.0
        per_byte_s = median(duration / volume for _, volume, duration in rows)
    return alpha_s, 1 / per_byte_s


def _least_relative_squares(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Minimise the sum of ((a m + b v - t) / t)**2 over a and b; (0, 0) where the rows do not tell them apart."""
    mm = mv = vv = m1 = v1 = 0.0
    for messages, volume, duration in rows:
        m, v = messages / duration, volume / duration
        mm, mv, vv, m1, v1 = mm + m * m, mv + m * v, vv + v * v, m1 + m, v1 + v
    determinant = mm * vv - mv * mv
    if determinant <= 1e-9 * mm * vv:
        return 0.0, 0.0
    return (m1 * vv - v1 * mv) / determinant, (v1 * mm - m1 * mv) / determinant


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """Seconds of any collective among `num_ranks`: `kind` says where they come from.

    `measured`: curves of `memadvisor calibrate`, for this number of ranks or the nearest one, whose
    points are carried over by the ring formula. `fitted`: alpha and beta fitted to the run's own, the largest of which
    has `largest_bytes`.
    `slowdown`: what compute and collectives cost each other at the same time; None where that was not measured, and is
    taken to be nothing. `alternatives`: measured curves of other algorithms, by operation, algorithm and number of ranks.
    `engine`: what the engine itself takes of the thread that computes; None where that was not measured, likewise.
    """

    kind: str
    source: str
    curves: Mapping[str, CollectiveCurve]
    alpha_s: float | None = None
    beta_bytes_per_s: float | None = None
    largest_bytes: int | None = None
    slowdown: OverlapSlowdown | None = None
    alternatives: Mapping[tuple[str, str, int], CollectiveCurve] = field(default_factory=dict)
    engine: EngineCost | None = None

    def seconds(
        self, operation: str, size_bytes: float, num_ranks: int, algorithm: str | None = None
    ) -> float:
        """By an algorithm that was not measured it takes as long as the usual one."""
        if num_ranks == 1 or size_bytes <= 0:
            return 0.0
        other = None if algorithm is None else self.alternatives.get((operation, algorithm, num_ranks))
        if other is not None:
            return curve_seconds(other, size_bytes)
        curve = self.curves.get(operation)
        if curve is not None:
            return curve_seconds(curve, size_bytes) * _rank_factor(curve, num_ranks)
        if self.alpha_s is None or self.beta_bytes_per_s is None:
            raise AssertionError(f"no times for {operation}")
        return ring_seconds(operation, size_bytes, num_ranks, self.alpha_s, self.beta_bytes_per_s)


def _rank_factor(curve: CollectiveCurve, num_ranks: int) -> float:
    """A ring's traffic goes as (n-1)/n; used only where no curve for this number of ranks was measured."""
    if curve.num_ranks == num_ranks:
        return 1.0
    measured = (curve.num_ranks - 1) / curve.num_ranks
    return ((num_ranks - 1) / num_ranks) / measured


def times_from_curves(
    curves: Sequence[CollectiveCurve],
    num_ranks: int,
    source: str,
    slowdown: OverlapSlowdown | None = None,
    alternatives: Sequence[CollectiveCurve] = (),
    engine: EngineCost | None = None,
) -> CollectiveTimes | None:
    """The curves of each operation for `num_ranks`, else for the nearest number of ranks measured.

    None unless all_reduce, all_gather and reduce_scatter are all there.
    """
    chosen: dict[str, CollectiveCurve] = {}
    for curve in curves:
        if curve.num_ranks < 2:
            continue
        known = chosen.get(curve.operation)
        if known is None or abs(curve.num_ranks - num_ranks) < abs(known.num_ranks - num_ranks):
            chosen[curve.operation] = curve
    if not {"all_reduce", "all_gather", "reduce_scatter"} <= set(chosen):
        return None
    others = {(c.operation, c.algorithm, c.num_ranks): c for c in alternatives if c.algorithm is not None}
    return CollectiveTimes(
        kind="measured",
        source=source,
        curves=chosen,
        slowdown=slowdown,
        alternatives=others,
        engine=engine,
    )


def times_from_observations(observations: Sequence[Observation], source: str) -> CollectiveTimes | None:
    """Alpha and beta fitted to what was observed; None without any usable observation."""
    fitted = fit_ring(observations)
    if fitted is None:
        return None
    return CollectiveTimes(
        kind="fitted",
        source=source,
        curves={},
        alpha_s=fitted[0],
        beta_bytes_per_s=fitted[1],
        largest_bytes=max(seen.size_bytes for seen in observations),
    )


def times_of_sizes(observations: Sequence[Observation], source: str) -> CollectiveTimes | None:
    """Curves through the typical duration of each size that was observed; None without any.

    For plans whose messages are of the sizes observed: nothing is assumed of how an operation goes.
    """
    seen: dict[str, dict[int, list[float]]] = {}
    num_ranks: dict[str, int] = {}
    for row in observations:
        seen.setdefault(row.operation, {}).setdefault(row.size_bytes, []).append(row.duration_s)
        num_ranks[row.operation] = row.num_ranks
    curves = {}
    for operation, by_size in seen.items():
        durations_s = [median(by_size[size]) for size in sorted(by_size)]
        curves[operation] = CollectiveCurve(
            operation=operation,
            num_ranks=num_ranks[operation],
            sizes_bytes=tuple(sorted(by_size)),
            durations_s=tuple(min(durations_s[place:]) for place in range(len(durations_s))),
        )
    return CollectiveTimes(kind="fitted", source=source, curves=curves) if curves else None
