"""Where units and modules stand under the roofline of the hardware (Williams, Waterman, Patterson: Roofline, CACM
52(4), 2009): arithmetic intensity in FLOP per byte against FLOP per second.

The roof at an intensity I is min(peak FLOP/s, I times memory bandwidth); the two meet at the ridge. Bytes are the
least that the operators must move (capture/traffic.py), so the intensity is an upper bound, and a point may lie
above the roof where a cache served what counts as memory traffic. Elementwise work counts no FLOPs: what does
nothing else has intensity 0 and is measured by its bytes alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memadvisor.analyzers.model_shape import training_operators
from memadvisor.analyzers.operators import known_sum
from memadvisor.analyzers.step_time import StepTime
from memadvisor.analyzers.utilization import Utilization
from memadvisor.hardware.hardware import Hardware
from memadvisor.run.records import Operator
from memadvisor.run.run import RankRun

# Below this share of the roof neither arithmetic nor memory can be what it waits for.
LATENCY_BELOW_FRACTION = 0.1
OPTIMIZER = "(optimizer step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One unit or module in a training step, forward, backward and recomputation together.

    `roof`: which roof is the lower one at its intensity, `compute` or `memory`. `roof_fraction`: the least time
    that the two roofs allow, over the time it took. `bound`: `latency` where that is under
    LATENCY_BELOW_FRACTION (launches, the framework, work too small to fill the device), else the roof. What
    follows from a peak, a bandwidth or a time that is not known is None.
    """

    name: str
    executed_flops: int
    moved_bytes: int | None
    time_s: float | None
    intensity_flops_per_byte: float | None
    attained_flops_per_s: float | None
    roof: str | None
    roof_fraction: float | None
    bound: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Units by their time in timed steps (with `OPTIMIZER`, the optimizer step); modules, each without those inside
    it, by their operators' own time in the traced step, which on an accelerator is launching and so left out."""

    peak_flops_per_s: float | None
    memory_bandwidth_bytes_per_s: float | None
    ridge_flops_per_byte: float | None
    units: tuple[RooflinePoint, ...]
    modules: tuple[RooflinePoint, ...]


def roofline(
    rank: RankRun, time: StepTime | None, used: Utilization, hardware: Hardware | None
) -> Roofline | None:
    """None where the traced step recorded no bytes. Points come with most bytes and FLOPs' least time first."""
    rows = [row for row in training_operators(rank) if row.phase in ("forward", "recompute", "backward")]
    if all(row.read_bytes is None for row in rows):
        return None
    peak = used.peak_flops_per_s
    bandwidth = None if hardware is None else hardware.memory_bandwidth_bytes_per_s
    spent_s = {} if time is None else {u.unit: u.forward_s + u.backward_s + u.recompute_s for u in time.units}
    steps = [row for row in rank.operators if row.phase == "optimizer"]
    optimizer_s = None if time is None else time.by_phase_s.get("optimizer")
    units = [
        _point(name, group, spent_s.get(name), peak, bandwidth)
        for name, group in _groups(rows, lambda row: row.unit).items()
        if name in {unit.name for unit in rank.units}
    ]
    if steps:
        units.append(_point(OPTIMIZER, steps, optimizer_s, peak, bandwidth))
    is_timed = rank.process.device == "cpu"
    modules = [
        _point(name, group, _own_time_s(group) if is_timed else None, peak, bandwidth)
        for name, group in _groups(rows, lambda row: row.module).items()
    ]
    return Roofline(
        peak_flops_per_s=peak,
        memory_bandwidth_bytes_per_s=bandwidth,
        ridge_flops_per_byte=peak / bandwidth if peak and bandwidth else None,
        units=_heaviest_first(units),
        modules=_heaviest_first(modules),
    )


def _groups(rows: Iterable[Operator], key: Callable[[Operator], str]) -> dict[str, list[Operator]]:
    groups: dict[str, list[Operator]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _own_time_s(rows: Iterable[Operator]) -> float:
    return sum(row.end_s - row.start_s for row in rows)


def _point(
    name: str, rows: list[Operator], time_s: float | None, peak: float | None, bandwidth: float | None
) -> RooflinePoint:
    flops = sum(row.executed_flops for row in rows)
    # Collectives among them move what the network moves; they are no memory traffic of the unit.
    moved = known_sum(
        None if row.read_bytes is None or row.written_bytes is None else row.read_bytes + row.written_bytes
        for row in rows
        if not row.name.startswith(("c10d", "_c10d_functional"))
    )
    time_s = time_s if time_s else None
    roof = fraction = bound = None
    if peak and bandwidth and moved is not None and (flops or moved):
        compute_s, memory_s = flops / peak, moved / bandwidth
        roof = "compute" if compute_s >= memory_s else "memory"
        if time_s is not None:
            fraction = max(compute_s, memory_s) / time_s
            bound = "latency" if fraction < LATENCY_BELOW_FRACTION else roof
    return RooflinePoint(
        name=name,
        executed_flops=flops,
        moved_bytes=moved,
        time_s=time_s,
        intensity_flops_per_byte=flops / moved if moved else None,
        attained_flops_per_s=None if time_s is None else flops / time_s,
        roof=roof,
        roof_fraction=fraction,
        bound=bound,
    )


def _heaviest_first(points: Iterable[RooflinePoint]) -> tuple[RooflinePoint, ...]:
    return tuple(sorted(points, key=lambda p: (-(p.time_s or 0.0), -p.executed_flops, -(p.moved_bytes or 0))))
