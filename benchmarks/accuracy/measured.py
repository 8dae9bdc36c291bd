"""Rows of published tables that coefficients are fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks.accuracy.page import SWEEP
from benchmarks.accuracy.tables import TABLES, published_rows
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.pipelines.automatic import AUTOMATIC
from memadvisor.errors import UsageError
from memadvisor.layout_table.read import LayoutCase

UNEXPLAINED = 512
_NEARLY_FULL_BYTES = 0.9 * 80e9
_BUSY_MFU_PCT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row of a table. `failed`: it crashed, of whatever. `is_busy`: its MFU is 10 % and more, or the table does not say
    it."""

    table: str
    model: str
    case: LayoutCase
    step_time_s: float | None
    peak_bytes: float | None
    failed: bool
    is_busy: bool


def measured_rows(directory: Path) -> list[Measured]:
    """Rows of all tables whose layout is described wholly and which say a time, a peak that the allocator reserved, or that
    they failed; benchmarks/fit_layouts.py says which times are left out."""
    found = []
    for published in TABLES:
        table = pd.read_csv(directory / f"{published.name}.csv")
        seconds = published.seconds(table)
        if published.name == SWEEP:
            seconds = seconds.where(table.n_gpus < UNEXPLAINED)
        peaks = pd.Series(math.nan, index=table.index)
        if "gpu_memory_gb" in table:
            peaks = (table.gpu_memory_gb * 1e9).where(table.status == "ok")
            seconds = seconds.where(~(peaks > _NEARLY_FULL_BYTES))
        failed = table.status.ne("ok") if published.name == SWEEP else pd.Series(False, index=table.index)
        idle = table.mfu_pct < _BUSY_MFU_PCT if published.name == SWEEP else failed
        models = table.model if "model" in table else table.hidden
        for place, row in enumerate(published_rows(directory, published)):
            second, peak = float(seconds.iloc[place]), float(peaks.iloc[place])
            nothing = math.isnan(second) and math.isnan(peak) and not failed.iloc[place]
            if row.case is None or row.case.micro_batch_is_open or nothing:
                continue
            if row.case.step.layout.schedule in AUTOMATIC:
                continue
            found.append(
                Measured(
                    table=published.name,
                    model=str(models.iloc[place]),
                    case=row.case,
                    step_time_s=None if math.isnan(second) else second,
                    peak_bytes=None if math.isnan(peak) else peak,
                    failed=bool(failed.iloc[place]),
                    is_busy=not idle.iloc[place],
                )
            )
    return [row for row in found if _can_be_priced(row.case)]


def _can_be_priced(case: LayoutCase) -> bool:
    try:
        estimate_step(case.architecture, case.step, case.cluster)
    except UsageError:
        return False
    return True
