"""Where a table's errors lie: by column, and in its worst rows."""

from __future__ import annotations

import pandas as pd

from benchmarks.accuracy.scores import errors

_TRAITS = ("model", "n_gpus", "dp", "tp", "pp", "zero_stage", "micro_batch_size")
_NUM_WORST = 10


def error_by(frame: pd.DataFrame, column: str, title: str) -> list[str]:
    """Markdown: errors of time (all rows, and those at MFU >= 10 %) and of memory for each value of a column."""
    parts = [
        f"| {title} | rows | time MAPE | at MFU >= 10 %: rows | MAPE | memory MAPE |",
        "|---|---|---|---|---|---|",
    ]
    for value, rows in frame[frame.measured_s.notna()].groupby(column):
        busy = rows[rows.mfu_pct >= 10]
        memory = errors(rows.predicted_bytes, rows.measured_bytes)
        number = f"{value:g}" if isinstance(value, float) else value
        parts.append(
            f"| {number} | {len(rows)} | {_error(rows)} | {len(busy)} | {_error(busy) if len(busy) else '-'} | "
            f"{memory.mape * 100:.1f} % ({memory.bias * 100:+.1f}) |"
        )
    return [*parts, ""]


def _error(rows: pd.DataFrame) -> str:
    time = errors(rows.predicted_s, rows.measured_s)
    return f"{time.mape * 100:.1f} % ({time.bias * 100:+.1f})"


_CHANCES = (0.0, 1e-6, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 0.9, 1.0)


def failed_by_chance(frame: pd.DataFrame) -> list[str]:
    """Markdown: what share of rows failed, by the predicted chance that they run out of memory."""
    known = frame[frame.p_oom.notna()]
    parts = ["| predicted chance of running out of memory | rows | failed |", "|---|---|---|"]
    for place, rows in known.groupby(pd.cut(known.p_oom, _CHANCES, include_lowest=True, labels=False)):
        low, high = _CHANCES[int(place)], _CHANCES[int(place) + 1]
        parts.append(
            f"| {low * 100:g} to {high * 100:g} % | {len(rows)} | {(~rows.ran).mean() * 100:.0f} % |"
        )
    return [
        *parts,
        "",
        "Some fail far below their memory's end: crashes and time-outs, which the table does not tell from running out.",
        "",
    ]


def missing_per_microbatch(frame: pd.DataFrame) -> list[str]:
    """Markdown: measured less predicted time over microbatches, the median in ms by accelerators and pipeline stages."""
    known = frame[frame.measured_s.notna() & frame.predicted_s.notna()]
    missing_ms = (known.measured_s - known.predicted_s) / known.grad_accum * 1e3
    medians = missing_ms.groupby([known.n_gpus, known.pp]).median().unstack()
    parts = [
        "### Milliseconds that a microbatch took longer than predicted, median",
        "",
        "| accelerators | " + " | ".join(f"{stages} stages" for stages in medians.columns) + " |",
        "|---" * (1 + len(medians.columns)) + "|",
    ]
    for number, row in medians.iterrows():
        cells = ["-" if pd.isna(value) else f"{value:.0f}" for value in row]
        parts.append(f"| {number} | " + " | ".join(cells) + " |")
    return [
        *parts,
        "",
        "Pipelined jobs are of two kinds with nothing between: as fast as predicted, or longer by a quarter of a second for each "
        "message of the busiest stage, whatever the model, the bytes, the tensor degree and the place of the stages, inside a node "
        "too. The more nodes, the more of them: predicted are jobs that are held up where that is likelier than not, by a chance of "
        "each node that is fitted below 512 accelerators ([cost-model.md](cost-model.md#software)). The columns of the table do "
        "not tell which of two jobs of the same size it is.",
        "",
        "Jobs without a pipeline are of two kinds too: at 512 accelerators two in three take some 0.3 ms for each rank of each "
        "collective of tensor parallelism longer, and of fewer accelerators one in twenty. That is what all pipelines between nodes "
        "take (`pipelined_call_s`). As it is the rarer kind below 512 it is not predicted. The best of a decision there is a "
        "job that was not held up, of several that were predicted alike: what is left of regret. Neither the model, the tensor degree, "
        "the micro-batch, the ZeRO stage, the peak of memory nor the number of microbatches tells the two kinds apart: of 8B on 128 x 4 "
        "ranks one microbatch took 0.66 s and two halves of it 5.3 s.",
        "",
    ]


_TWINS = (
    "model",
    "n_gpus",
    "dp",
    "tp",
    "pp",
    "micro_batch_size",
    "grad_accum",
    "seq_len",
    "global_batch_seqs",
)
_FAR_APART = 1.25


def apart_by_stage(frame: pd.DataFrame) -> list[str]:
    """Markdown: by accelerators, how far apart jobs without a pipeline are that differ by ZeRO stage 0 or 1 alone."""
    known = frame[frame.ran & frame.measured_s.notna() & frame.predicted_s.notna() & (frame.pp == 1)]
    pairs = known.pivot_table(index=list(_TWINS), columns="zero_stage", values=["measured_s", "predicted_s"])
    if not {0, 1} <= set(pairs.columns.get_level_values(1)):
        return []
    ratios = pd.DataFrame({name: pairs[name][0] / pairs[name][1] for name in ("measured_s", "predicted_s")})
    apart = ratios.dropna().apply(lambda ratio: ratio.where(ratio >= 1, 1 / ratio))
    parts = [
        "Of jobs without a pipeline that differ by ZeRO stage 0 or 1 alone, by how much the slower one takes longer: up to 64 accelerators "
        "as little as predicted, at 512 many times as much in some, and either stage may be the slower one. The table has one run of each: "
        "which of two such jobs was held up no prediction from their columns can know, and the decisions at 512 accelerators, which "
        "are nearly all of the regret, turn on it. Four jobs of 8B on 128 x 4 ranks there, predicted to take 0.70 to 0.82 s, "
        "took 0.66, 0.95, 1.28 and 5.3 s, and neither the stage nor the micro-batch orders them. To predict all jobs on 64 nodes as held up, which two in "
        "three are, by the time that pipelines between nodes take for each collective, was tried: the pick of 8B is then the best, that of "
        "80B, whose best was not held up, becomes a pipeline of 13.6 s for 6.0, and the mean regret is 52 %. "
        "To pick by expected time was tried too: with that delay times a chance of a fifth to two thirds it is 43 to 64 %, and by how much "
        "longer jobs of as many accelerators, with a pipeline or without, took on average among the other models, 29 % with one pick that "
        "failed (36 % by the median).",
        "",
        "| accelerators | pairs | measured, median | nine in ten below | more than 25 % | predicted, median |",
        "|---|---|---|---|---|---|",
    ]
    for number, rows in apart.groupby(level="n_gpus"):
        measured = rows.measured_s
        parts.append(
            f"| {number} | {len(rows)} | {(measured.median() - 1) * 100:.1f} % | {(measured.quantile(0.9) - 1) * 100:.0f} % | "
            f"{(measured > _FAR_APART).sum()} | {(rows.predicted_s.median() - 1) * 100:.1f} % |"
        )
    return [*parts, ""]


def common_to(frame: pd.DataFrame) -> list[str]:
    """Markdown: the worst rows of time at MFU >= 10 % and of memory, and what most of them share that few others have."""
    parts = []
    for unit, title, rows in (
        ("s", "step time, at MFU >= 10 %", frame[frame.mfu_pct >= 10]),
        ("bytes", "memory", frame),
    ):
        known = rows[rows[f"measured_{unit}"].notna() & rows[f"predicted_{unit}"].notna()]
        relative = known[f"predicted_{unit}"] / known[f"measured_{unit}"] - 1
        worst = known.loc[relative.abs().nlargest(_NUM_WORST).index]
        scale, name = (1.0, "s") if unit == "s" else (1e9, "GB")
        parts += [
            f"### The {len(worst)} worst rows of {title}",
            "",
            f"| model | GPUs | dp | tp | pp | ZeRO | micro-batch | microbatches | MFU | measured, {name} | predicted, {name} | off |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for label, row in worst.iterrows():
            parts.append(
                f"| {row.model} | {row.n_gpus} | {row.dp} | {row.tp} | {row.pp} | {row.zero_stage} | {row.micro_batch_size} | {row.grad_accum} | "
                f"{row.mfu_pct} % | {row[f'measured_{unit}'] / scale:.3g} | {row[f'predicted_{unit}'] / scale:.3g} | {relative[label] * 100:+.0f} % |"
            )
        parts += ["", f"What they share: {_shared(worst, known)}.", ""]
    return parts


def _shared(worst: pd.DataFrame, everything: pd.DataFrame) -> str:
    """Values that at least half of the worst rows have and at least twice as often as all rows do."""
    found = []
    for column in _TRAITS:
        for value, share in worst[column].value_counts(normalize=True).items():
            usual = float((everything[column] == value).mean())
            if share >= 0.5 and share >= 2 * usual:
                found.append(f"{column} {value} ({share:.0%} of them, {usual:.0%} of all)")
    return "; ".join(found) if found else "nothing in the columns of the table; they stay unexplained"
