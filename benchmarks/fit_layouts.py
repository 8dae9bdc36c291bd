"""Fits the coefficients of memadvisor/cost/layouts/coefficients.py to a directory of published tables.

    python benchmarks/fit_layouts.py DIR [--leave-one-out] [--every N]

Each table weighs the same, whatever its number of rows; errors are logarithms of predicted over measured, and a row that is
off by more than some `OFF` counts hardly more than one that is off by that (Cauchy's loss), so that runs that a network or an
allocator held up do not bend the physics. All rows that ran count, whatever their MFU: planners choose among slow layouts
too. Left out of the times are rows within a tenth of their device's memory, where an allocator that frees and tries again is
what was measured; rows on `UNEXPLAINED` accelerators and more of the sweep, where its cluster took 35 ms more for every layer
whatever the layout, which is no other cluster's physics; and pipelines whose order of work follows from the costs themselves.
Of tables with over 500 rows each `--every`th counts. `--leave-one-out` fits anew without each model of the sweep and says
what the others' coefficients make of it. Prints the coefficients; whoever likes them writes them into the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.accuracy.page import SWEEP
from benchmarks.accuracy.tables import TABLES
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.pipelines.automatic import AUTOMATIC
from memadvisor.errors import UsageError
from memadvisor.layout_table.read import LayoutCase, read_layout_table

TIME_BOUNDS = {
    "matmul_share": (0.5, 0.95),
    "matmul_share_fast": (0.45, 0.8),
    "matmul_fixed_s": (2e-6, 60e-6),
    "attention_share": (0.3, 1.0),
    "attention_backward_share": (0.5, 1.0),
    "bandwidth_share": (0.5, 0.95),
    "host_forward_s": (0.5e-3, 2e-3),
    "host_backward_s": (0.2e-3, 4e-3),
    "host_call_s": (1e-6, 0.5e-3),
    "inside_share": (0.5, 0.9),
    "across_share": (0.3, 0.9),
    "tree_share": (0.5, 0.95),
    "collective_s": (5e-6, 300e-6),
    "overlap_slowdown": (0.02, 0.4),
    "step_fixed_s": (1e-3, 0.1),
    "pipeline_message_s": (5e-6, 1e-3),
}
MEMORY_BOUNDS = {
    "allocator_share": (1.0, 1.3),
    "allocator_fixed_bytes": (0.1e9, 2e9),
}
OFF = 0.15
UNEXPLAINED = 512
NEARLY_FULL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of a table that ran."""

    table: str
    model: str
    case: LayoutCase
    step_time_s: float | None
    peak_bytes: float | None


def measured_rows(directory: Path) -> list[Measured]:
    """Rows of all tables whose layout is described wholly and which say a time, or a peak that the allocator reserved."""
    found = []
    for published in TABLES:
        path = directory / f"{published.name}.csv"
        table = pd.read_csv(path)
        seconds = published.seconds(table)
        if published.name == SWEEP:
            seconds = seconds.where(table.n_gpus < UNEXPLAINED)
        peaks = pd.Series(math.nan, index=table.index)
        if "gpu_memory_gb" in table:
            peaks = (table.gpu_memory_gb * 1e9).where(table.status == "ok")
            seconds = seconds.where(~(table.gpu_memory_gb > NEARLY_FULL * 80))
        models = table.model if "model" in table else table.hidden
        for row, model, second, peak in zip(read_layout_table(path), models, seconds, peaks, strict=True):
            if row.case is None or row.case.micro_batch_is_open or (pd.isna(second) and pd.isna(peak)):
                continue
            if row.case.step.layout.schedule in AUTOMATIC:
                continue
            found.append(
                Measured(
                    table=published.name,
                    model=str(model),
                    case=row.case,
                    step_time_s=None if pd.isna(second) else float(second),
                    peak_bytes=None if pd.isna(peak) else float(peak),
                )
            )
    return [row for row in found if _can_be_priced(row)]


def _can_be_priced(row: Measured) -> bool:
    try:
        estimate_step(row.case.architecture, row.case.step, row.case.cluster)
    except UsageError:
        return False
    return True


def _time_error(row: Measured, known: Coefficients) -> float:
    case = row.case
    predicted = estimate_step(case.architecture, case.step, case.cluster, known).step_time_s
    return math.log(predicted / row.step_time_s) if row.step_time_s else 0.0


def _memory_error(row: Measured, known: Coefficients) -> float:
    case = row.case
    predicted = estimate_step(case.architecture, case.step, case.cluster, known).peak_memory_bytes
    return math.log(predicted / row.peak_bytes) if row.peak_bytes else 0.0


def _fit(
    rows: Sequence[Measured],
    bounds: Mapping[str, tuple[float, float]],
    start: Coefficients,
    error: Callable[[Measured, Coefficients], float],
) -> Coefficients:
    names = list(bounds)
    low, high = np.log([bounds[name] for name in names]).T
    first = np.clip(np.log([getattr(start, name) for name in names]), low + 1e-6, high - 1e-6)
    tables = [row.table for row in rows]
    weights = np.array([1 / math.sqrt(tables.count(table)) for table in tables])

    def coefficients(point: np.ndarray) -> Coefficients:
        return dataclasses.replace(start, **dict(zip(names, np.exp(point).tolist(), strict=True)))

    def errors(point: np.ndarray) -> np.ndarray:
        known = coefficients(point)
        # What no row says anything of stays where it was.
        off = np.array([error(row, known) for row in rows]) / OFF
        counted = OFF * np.sign(off) * np.sqrt(np.log1p(off**2))
        return np.concatenate([weights * counted, 0.01 * (point - first)])

    found = least_squares(errors, first, bounds=(low, high), diff_step=1e-2, max_nfev=12)
    return coefficients(found.x)


def fit(rows: Sequence[Measured], start: Coefficients = FITTED, every: int = 1) -> Coefficients:
    """Times first, peaks then: neither depends on the other's coefficients. Of tables with over 500 rows, each `every`th."""
    many = {row.table for row in rows if sum(other.table == row.table for other in rows) > 500}
    timed = [
        row
        for place, row in enumerate(rows)
        if row.step_time_s and (row.table not in many or place % every == 0)
    ]
    seen = [row for row in rows if row.peak_bytes]
    known = _fit(timed, TIME_BOUNDS, start, _time_error)
    return _fit(seen, MEMORY_BOUNDS, known, _memory_error) if seen else known


def mean_errors(rows: Sequence[Measured], known: Coefficients) -> tuple[float, float]:
    """MAPE of times and of peaks; NaN where no row has one."""
    times = [abs(math.expm1(_time_error(row, known))) for row in rows if row.step_time_s]
    peaks = [abs(math.expm1(_memory_error(row, known))) for row in rows if row.peak_bytes]
    return (
        float(np.mean(times)) if times else math.nan,
        float(np.mean(peaks)) if peaks else math.nan,
    )


def leave_one_out(
    rows: Sequence[Measured], table: str, every: int
) -> dict[str, tuple[tuple[float, float], tuple[float, float]]]:
    """Of each model of `table`: (errors with the whole fit, errors of a fit that never saw it)."""
    whole = fit(rows, every=every)
    result = {}
    for model in sorted({row.model for row in rows if row.table == table}):
        mine = [row for row in rows if row.table == table and row.model == model]
        others = fit([row for row in rows if row not in mine], every=every)
        result[model] = (mean_errors(mine, whole), mean_errors(mine, others))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--every", type=int, default=4, help="of large tables, each Nth row (4)")
    options = parser.parse_args()
    rows = measured_rows(options.directory)
    if options.leave_one_out:
        for model, (whole, alone) in leave_one_out(rows, SWEEP, options.every).items():
            print(
                f"{model:6} time {whole[0]:.1%} -> {alone[0]:.1%}   memory {whole[1]:.1%} -> {alone[1]:.1%}"
            )
        return
    known = fit(rows, every=options.every)
    for field in dataclasses.fields(known):
        print(f"{field.name:26} {getattr(known, field.name):.4g}   (was {getattr(FITTED, field.name):.4g})")
    for table in sorted({row.table for row in rows}):
        mine = [row for row in rows if row.table == table]
        before, after = mean_errors(mine, FITTED), mean_errors(mine, known)
        print(f"{table:24} time {before[0]:.1%} -> {after[0]:.1%}   memory {before[1]:.1%} -> {after[1]:.1%}")


if __name__ == "__main__":
    main()
