"""What each decision of a table of layouts came to: the pick, the best that ran, and how much of the mean regret is one decision's."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.scores import DECISION

# As many of the worst decisions are left out, one after the other.
_LEFT_OUT = 2


def decided(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each decision with a pick and a job that ran: rows `pick` and `best` of `rows`, and the regret, NaN where the pick failed."""
    found = []
    for _, decision in rows.groupby([column for column in DECISION if column in rows]):
        ran = decision.measured_s.dropna()
        candidates = decision.predicted_s[decision.fits.astype(bool)].dropna()
        if not ran.empty and not candidates.empty:
            pick, best = candidates.idxmin(), ran.idxmin()
            found.append(
                {"pick": pick, "best": best, "regret": rows.measured_s[pick] / rows.measured_s[best] - 1}
            )
    return pd.DataFrame(found, columns=["pick", "best", "regret"])


def decision_lines(rows: pd.DataFrame) -> list[str]:
    decisions = decided(rows)
    worst = decisions.regret.dropna().sort_values(ascending=False)
    without = [float(worst.iloc[count:].mean()) for count in range(_LEFT_OUT + 1)]
    lines = [
        f"The mean over all decisions is {100 * without[0]:.1f} %, without the worst {100 * without[1]:.1f} %, without the two worst {100 * without[2]:.1f} %:",
        "",
        "| model | accelerators | picked | predicted, s | measured, s | best | predicted, s | measured, s | regret |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for pick, best, lost in decisions.itertuples(index=False):
        row = rows.loc[pick]
        lines.append(
            f"| {row.model} | {row.n_gpus} | {_layout(row)} | {_layout(rows.loc[best])} | {100 * lost:.1f} % |"
        )
    return [*lines, ""]


def _layout(row: pd.Series) -> str:
    name = f"dp {row.dp} tp {row.tp} pp {row.pp}, ZeRO {row.zero_stage}, micro-batch {row.micro_batch_size}"
    return f"{name} | {row.predicted_s:.3g} | {row.measured_s:.3g}"
