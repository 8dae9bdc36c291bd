"""How far predictions are from measurements: errors, fits, regret of decisions, and the null baseline to beat.

A relative error is predicted / measured - 1. A decision is what shares a model, a number of accelerators, a sequence
length and a global batch: the advisor would take the fastest layout that it says fits. Its regret is by how much that one
ran longer than the fastest measured one; if its run failed, it is a failed pick and has no regret.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

DECISION = ("model", "n_gpus", "seq_len", "global_batch_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of rows with both numbers. `mape`, `median`, `p90`: of absolute relative errors; `bias`: mean of signed ones;
    `spearman`: rank correlation, nan for fewer than two rows.
    """

    num_rows: int
    mape: float
    median: float
    p90: float
    bias: float
    spearman: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fits:
    """Shares: rows judged right; of those that failed, said to fit; of those that ran, said not to fit."""

    num_rows: int
    accuracy: float
    said_fits_but_failed: float
    said_oom_but_ran: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """`decisions`: those with a pick. `mean`, `worst`: regret of picks that ran, nan without any. `no_pick`: decisions in which
    nothing was said to fit. Decisions of which no layout ran are left out.
    """

    decisions: int
    mean: float
    worst: float
    failed_picks: int
    no_pick: int


def errors(predicted: pd.Series, measured: pd.Series) -> Errors:
    """Rows that lack either number are left out; `num_rows` says how many are in."""
    both = predicted.notna() & measured.notna()
    predicted, measured = predicted[both].astype(float), measured[both].astype(float)
    relative = predicted / measured - 1
    absolute = relative.abs()
    ranked = len(relative) > 1 and predicted.nunique() > 1 and measured.nunique() > 1
    return Errors(
        num_rows=len(relative),
        mape=float(absolute.mean()),
        median=float(absolute.median()),
        p90=float(absolute.quantile(0.9)),
        bias=float(relative.mean()),
        spearman=float(predicted.corr(measured, method="spearman")) if ranked else math.nan,
    )


def fit_judgement(fits: pd.Series, ran: pd.Series) -> Fits:
    """A row without a prediction counts as said not to fit."""
    failed = ~ran
    return Fits(
        num_rows=len(ran),
        accuracy=float((fits == ran).mean()),
        said_fits_but_failed=float((fits & failed).sum() / max(int(failed.sum()), 1)),
        said_oom_but_ran=float((~fits & ran).sum() / max(int(ran.sum()), 1)),
    )


def regret(rows: pd.DataFrame, predicted_s: pd.Series, fits: pd.Series) -> Regret:
    """`rows` has `measured_s`, empty where the run failed, and the columns of DECISION that it knows."""
    losses: list[float] = []
    failed_picks = no_pick = 0
    for _, decision in rows.groupby([column for column in DECISION if column in rows]):
        ran = decision.measured_s.dropna()
        if ran.empty:
            continue
        candidates = predicted_s[decision.index][fits[decision.index]].dropna()
        if candidates.empty:
            no_pick += 1
            continue
        taken_s = decision.measured_s[candidates.idxmin()]
        if pd.isna(taken_s):
            failed_picks += 1
        else:
            losses.append(float(taken_s / ran.min() - 1))
    return Regret(
        decisions=len(losses) + failed_picks,
        mean=float(np.mean(losses)) if losses else math.nan,
        worst=max(losses, default=math.nan),
        failed_picks=failed_picks,
        no_pick=no_pick,
    )


def shuffled_regret(
    rows: pd.DataFrame, predicted_s: pd.Series, fits: pd.Series, times: int = 20
) -> tuple[float, float]:
    """(mean regret, failed picks) on average over `times` random orders of the rows, which decide between equal predictions."""
    found = []
    for seed in range(times):
        order = np.random.default_rng(seed).permutation(rows.index)
        found.append(regret(rows.loc[order], predicted_s.loc[order], fits.loc[order]))
    return (
        float(np.mean([one.mean for one in found])),
        float(np.mean([one.failed_picks for one in found])),
    )


def null_seconds(rows: pd.DataFrame) -> pd.Series:
    """One constant rate for all rows, times 1F1B's bubble and 4/3 where layers are recomputed; the constant is the median
    that `measured_s` asks for. FLOPs are 6 of each parameter of a gated block and 12 L h s of attention, per token.
    """
    parameters = (
        rows.n_layers * (4 * rows.hidden**2 + 3 * rows.hidden * rows.ffn) + 2 * rows.vocab * rows.hidden
    )
    flops = (
        (6 * parameters + 12 * rows.n_layers * rows.hidden * rows.seq_len)
        * rows.global_batch_seqs
        * rows.seq_len
    )
    microbatches = (rows.global_batch_seqs / rows.dp / rows.micro_batch_size).clip(lower=1)
    again = pd.Series(np.where(rows.recompute == "full", 4 / 3, 1.0), index=rows.index)
    shape = flops / rows.n_gpus * (1 + (rows.pp - 1) / microbatches) * again
    return shape * (rows.measured_s / shape).median()


def null_bytes(rows: pd.DataFrame) -> pd.Series:
    """16 bytes of each parameter that a rank holds, and 34 s b h / t of each layer for 1F1B's microbatches (2 s b h where it is
    recomputed), times one constant, the median that `measured_bytes` asks for.
    """
    parameters = (
        rows.n_layers * (4 * rows.hidden**2 + 3 * rows.hidden * rows.ffn) / rows.pp
        + 2 * rows.vocab * rows.hidden
    )
    states = 16 * parameters / rows.tp
    tokens = rows.micro_batch_size * rows.seq_len / rows.cp
    per_layer = pd.Series(np.where(rows.recompute == "full", 2.0, 34.0), index=rows.index)
    microbatches = np.minimum(rows.pp, rows.global_batch_seqs / rows.dp / rows.micro_batch_size)
    shape = states + per_layer * tokens * rows.hidden / rows.tp * rows.n_layers / rows.pp * microbatches
    return shape * (rows.measured_bytes / shape).median()
