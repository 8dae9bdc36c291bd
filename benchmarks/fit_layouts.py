"""Fits the coefficients of memadvisor/cost/layouts/coefficients.py to a directory of published tables.

    python benchmarks/fit_layouts.py DIR [--every N] [--leave-one-out [--write docs/accuracy/held_out.json]]

Each table weighs the same, whatever its number of rows; errors are logarithms of predicted over measured, and a row that
is off by more than some `OFF` counts hardly more than one that is off by that (Cauchy's loss), so that runs that a
network or an allocator held up do not bend the physics. All rows that ran count, whatever their MFU: planners choose
among slow layouts too. Left out of the times are rows within a tenth of their device's memory, where an allocator that
frees and tries again is what was measured; rows on `UNEXPLAINED` accelerators and more of the sweep, most of which are of
jobs that were held up, which is no other cluster's physics; and pipelines whose order of work follows from the costs
themselves. Of tables with over 500 rows each `--every`th that has a time counts, in the file's order.

Times come first, then how often and how long nanotron's pipelines are held up, then peaks, then how far peaks are off, which
failed rows tell too. What nanotron's code and cluster take
(`memadvisor/software.py`) is fitted along, of its own rows. Every fit begins in the middle of the bounds, not where an earlier
one ended. `--leave-one-out` fits anew without each model of the sweep, and says what the others' coefficients make of it; it
takes some six minutes of one core. Prints the coefficients; whoever likes them writes them into the files, rounded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from scipy.optimize import least_squares, minimize
from scipy.stats import norm

from benchmarks.accuracy.held_out import HeldOut, fingerprint
from benchmarks.accuracy.measured import Measured, measured_rows
from benchmarks.accuracy.page import SWEEP
from memadvisor.cost.layouts.chance import memory_sigma
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.estimate import StepEstimate, estimate_step
from memadvisor.software import NANOTRON

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
    "nanotron.call_s": (10e-6, 1e-3),
    "nanotron.pipelined_call_s": (30e-6, 3e-3),
    "nanotron.far_call_s": (50e-6, 5e-3),
}
MEMORY_BOUNDS = {
    "allocator_share": (1.0, 1.3),
    "allocator_fixed_bytes": (0.1e9, 2e9),
    "nanotron.ahead_bytes": (4.0, 400.0),
}
STALL_BOUNDS = {
    "nanotron.stalling_node_chance": (1e-3, 0.1),
    "nanotron.stalled_message_s": (0.03, 3.0),
}
SPREAD_BOUNDS = {"peak_sigma": (0.01, 0.3), "activations_sigma": (0.03, 0.6)}
OFF = 0.15
# Of the sweep's rows failed that have a chance of less than one in a million to run out of memory.
FAILS_OTHERWISE = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Coefficients, and numbers of nanotron's preset."""

    known: Coefficients
    nanotron: Mapping[str, float]

    def estimate(self, row: Measured) -> StepEstimate:
        case, step = row.case, row.case.step
        if step.software.name == NANOTRON.software.name:
            step = dataclasses.replace(step, software=dataclasses.replace(step.software, **self.nanotron))
        return estimate_step(case.architecture, step, case.cluster, self.known)

    def replaced(self, names: Sequence[str], values: Sequence[float]) -> Fit:
        given = dict(zip(names, values, strict=True))
        theirs = {name.partition(".")[2]: value for name, value in given.items() if "." in name}
        ours = {name: value for name, value in given.items() if "." not in name}
        return Fit(known=dataclasses.replace(self.known, **ours), nanotron={**self.nanotron, **theirs})


TODAY = Fit(known=FITTED, nanotron={})


def _time_error(row: Measured, fit: Fit) -> float:
    return math.log(fit.estimate(row).step_time_s / row.step_time_s) if row.step_time_s else 0.0


def _memory_error(row: Measured, fit: Fit) -> float:
    return math.log(fit.estimate(row).peak_memory_bytes / row.peak_bytes) if row.peak_bytes else 0.0


def _fit(
    rows: Sequence[Measured],
    bounds: Mapping[str, tuple[float, float]],
    start: Fit,
    error: Callable[[Measured, Fit], float],
) -> Fit:
    names = list(bounds)
    low, high = np.log([bounds[name] for name in names]).T
    first = (low + high) / 2
    tables = [row.table for row in rows]
    weights = np.array([1 / math.sqrt(tables.count(table)) for table in tables])

    def errors(point: np.ndarray) -> np.ndarray:
        tried = start.replaced(names, np.exp(point).tolist())
        off = np.array([error(row, tried) for row in rows]) / OFF
        counted = OFF * np.sign(off) * np.sqrt(np.log1p(off**2))
        # What no row says anything of stays in the middle.
        return np.concatenate([weights * counted, 0.003 * (point - first)])

    found = least_squares(errors, first, bounds=(low, high), diff_step=1e-2, max_nfev=12)
    return start.replaced(names, np.exp(found.x).tolist())


def _fit_stalls(rows: Sequence[Measured], start: Fit) -> Fit:
    """The likeliest chance and length of stalls, of nanotron's pipelines of the sweep: each row is of a job that is held up
    or of one that is not (memadvisor/cost/layouts/stalls.py), with times that are off by `OFF`."""
    names = list(STALL_BOUNDS)
    rows = [
        row for row in rows if row.table == SWEEP and row.step_time_s and row.case.step.layout.pipeline > 1
    ]
    if not rows:
        return start
    measured = np.log([row.step_time_s for row in rows])
    nodes = np.array([row.case.cluster.num_nodes for row in rows])
    # Where all jobs are held up, and where none is; the length of a stall adds to a step's time in proportion.
    unit_s = 1.0
    free, held = (
        np.array([start.replaced(names, (chance, unit_s)).estimate(row).step_time_s for row in rows])
        for chance in (0.0, 1.0)
    )

    def unlikelihood(point: np.ndarray) -> float:
        chance, stall_s = np.exp(point)
        some = 1 - (1 - chance) ** nodes
        stalled = free + (held - free) * stall_s / unit_s
        likelihoods = [norm.pdf(measured - np.log(seconds), 0, OFF) for seconds in (free, stalled)]
        # A floor for rows of neither kind.
        return -float(np.log((1 - some) * likelihoods[0] + some * likelihoods[1] + 1e-3).sum())

    bounds = np.log(list(STALL_BOUNDS.values()))
    found = minimize(unlikelihood, bounds.mean(axis=1), bounds=bounds, method="Nelder-Mead")
    return start.replaced(names, np.exp(found.x).tolist())


def _fit_spread(rows: Sequence[Measured], start: Fit) -> Fit:
    """The likeliest standard deviations, of rows that ran by their peaks and of those that failed by their device's memory."""
    names = list(SPREAD_BOUNDS)
    states, measured, left = [], [], []
    for row in rows:
        estimate = start.estimate(row)
        worst = estimate.worst
        kept = worst.parameter_bytes + worst.gradient_bytes + worst.optimizer_bytes
        states.append(kept / worst.allocated_bytes)
        measured.append(math.log(row.peak_bytes / worst.peak_bytes) if row.peak_bytes else math.nan)
        left.append(math.log((estimate.memory_bytes - FITTED.context_bytes) / worst.peak_bytes))
    off, margin = np.array(measured), np.array(left)
    ran = ~np.isnan(off)

    def unlikelihood(point: np.ndarray) -> float:
        known = start.replaced(names, np.exp(point).tolist()).known
        sigma = np.array([memory_sigma(share, known) for share in states])
        failed = FAILS_OTHERWISE + (1 - FAILS_OTHERWISE) * norm.cdf(-margin / sigma)
        return float(-norm.logpdf(off, 0, sigma)[ran].sum() - np.log(failed[~ran]).sum())

    bounds = np.log(list(SPREAD_BOUNDS.values()))
    found = minimize(unlikelihood, bounds.mean(axis=1), bounds=bounds, method="Nelder-Mead")
    return start.replaced(names, np.exp(found.x).tolist())


def fit(rows: Sequence[Measured], every: int) -> Fit:
    """Times, then peaks, then the spread of peaks: what comes later depends on what came before alone."""
    timed = [row for row in rows if row.step_time_s]
    tables = [row.table for row in timed]
    many = {table for table in set(tables) if tables.count(table) > 500}
    timed = [row for place, row in enumerate(timed) if row.table not in many or place % every == 0]
    found = _fit(timed, TIME_BOUNDS, TODAY, _time_error)
    found = _fit_stalls(rows, found)
    found = _fit([row for row in rows if row.peak_bytes], MEMORY_BOUNDS, found, _memory_error)
    return _fit_spread([row for row in rows if row.peak_bytes or row.failed], found)


def mean_errors(rows: Sequence[Measured], found: Fit) -> tuple[float, float]:
    """MAPE of times (of rows with an MFU of 10 % and more where the table has it) and of peaks; NaN where no row has one."""
    times = [abs(math.expm1(_time_error(row, found))) for row in rows if row.step_time_s and row.is_busy]
    peaks = [abs(math.expm1(_memory_error(row, found))) for row in rows if row.peak_bytes]
    return (
        float(np.mean(times)) if times else math.nan,
        float(np.mean(peaks)) if peaks else math.nan,
    )


def leave_one_out(rows: Sequence[Measured], every: int) -> list[HeldOut]:
    """Each model of the sweep, by the fit of all rows and by one that never saw it."""
    whole = fit(rows, every)
    print(whole, flush=True)
    result = []
    for model in sorted({row.model for row in rows if row.table == SWEEP}):
        mine = [row for row in rows if row.table == SWEEP and row.model == model]
        others = fit([row for row in rows if not (row.table == SWEEP and row.model == model)], every)
        (seen_s, seen_bytes), (held_s, held_bytes) = mean_errors(mine, whole), mean_errors(mine, others)
        result.append(
            HeldOut(
                model=model,
                num_times=sum(bool(row.step_time_s) and row.is_busy for row in mine),
                num_peaks=sum(bool(row.peak_bytes) for row in mine),
                seen_time=seen_s,
                held_time=held_s,
                seen_memory=seen_bytes,
                held_memory=held_bytes,
            )
        )
        print(result[-1], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--write", type=Path, help="what was left out, for benchmarks/published.py")
    parser.add_argument("--every", type=int, default=8, help="of large tables, each Nth row (8)")
    options = parser.parse_args()
    rows = measured_rows(options.directory)
    if options.leave_one_out:
        found = leave_one_out(rows, options.every)
        if options.write is not None:
            held = {
                "fingerprint": fingerprint(),
                "every": options.every,
                "models": [dataclasses.asdict(one) for one in found],
            }
            options.write.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        return
    found_fit = fit(rows, options.every)
    for name in (*TIME_BOUNDS, *STALL_BOUNDS, *MEMORY_BOUNDS, *SPREAD_BOUNDS):
        whose, _, own = name.rpartition(".")
        now, was = (
            (found_fit.nanotron[own], getattr(NANOTRON.software, own))
            if whose
            else (getattr(found_fit.known, name), getattr(FITTED, name))
        )
        print(f"{name:28} {now:.4g}   (is {was:.4g})")
    for table in sorted({row.table for row in rows}):
        mine = [row for row in rows if row.table == table]
        (today_s, today_bytes), (fit_s, fit_bytes) = mean_errors(mine, TODAY), mean_errors(mine, found_fit)
        print(f"{table:24} time {today_s:.1%} -> {fit_s:.1%}   memory {today_bytes:.1%} -> {fit_bytes:.1%}")


if __name__ == "__main__":
    main()
