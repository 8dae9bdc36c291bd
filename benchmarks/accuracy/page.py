"""docs/accuracy.md from scored tables: every figure beside its target, the null baseline, and what peers reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from benchmarks.accuracy.analytic import Cell
from benchmarks.accuracy.decisions import decision_lines
from benchmarks.accuracy.pipelines import schedule_orders
from benchmarks.accuracy.scores import (
    Errors,
    Fits,
    Regret,
    errors,
    fit_judgement,
    null_seconds,
    regret,
    shuffled_regret,
)
from benchmarks.accuracy.tables import TABLES
from benchmarks.accuracy.where import (
    apart_by_stage,
    common_to,
    error_by,
    failed_by_chance,
    missing_per_microbatch,
)

SWEEP = "layout_sweep_h100"
PEERS_TIME, PEERS_MEMORY, PEERS_PICKS = "20-40 %", "40 %", "10 of 10"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing to show. `reached`, `null`, `peers`: figures in words; `met` None where nothing could be computed."""

    what: str
    target: str
    reached: str
    met: bool | None
    null: str = "-"
    peers: str = "-"


def targets(frames: Mapping[str, pd.DataFrame], cells: Mapping[str, Sequence[Cell]]) -> list[Target]:
    """All of them, in the order of the tables."""
    rows = _sweep_targets(frames[SWEEP])
    for published in TABLES:
        frame = frames[published.name]
        for unit, target, peers in (
            ("s", published.time_target, PEERS_TIME),
            ("bytes", published.memory_target, PEERS_MEMORY),
        ):
            if target is not None and published.name != SWEEP:
                ours, null = _pair(frame, unit)
                what = f"{published.name}: {'step time' if unit == 's' else 'memory'}, MAPE"
                rows.append(_at_most(what, ours.mape, target, null.mape, peers))
    orders = schedule_orders(frames["pipeline_schedules"])
    rows.append(
        Target(
            what="pipeline_schedules: order of schedules",
            target="right in every group",
            reached=f"{orders.right} of {orders.groups} groups",
            met=orders.right == orders.groups,
            null="none (all schedules alike)",
        )
    )
    for name in ("zero_model_states", "zero_max_model"):
        exact = sum(cell.is_exact for cell in cells[name])
        rows.append(
            Target(
                what=f"{name}: exact to rounding",
                target="all",
                reached=f"{exact} of {len(cells[name])}",
                met=exact == len(cells[name]),
            )
        )
    return rows


def _sweep_targets(frame: pd.DataFrame) -> list[Target]:
    busy = _busy(frame)
    (time, null_time), (memory, null_memory) = _pair(busy, "s"), _pair(frame, "bytes")
    fits = fit_judgement(frame.fits, frame.ran)
    everywhere = pd.Series(True, index=frame.index)
    null_fits = fit_judgement(everywhere, frame.ran)
    ours, null = regret(frame, frame.predicted_s, frame.fits), regret(frame, frame.null_s, everywhere)
    name = f"{SWEEP}: "
    return [
        _at_most(f"{name}memory, MAPE", memory.mape, 0.12, null_memory.mape, PEERS_MEMORY),
        Target(
            what=f"{name}fits or not, accuracy",
            target=">= 93 %",
            reached=percent(fits.accuracy),
            met=fits.accuracy >= 0.93,
            null=percent(null_fits.accuracy),
        ),
        _at_most(
            f"{name}said to fit, of those that failed",
            fits.said_fits_but_failed,
            0.08,
            null_fits.said_fits_but_failed,
            "-",
        ),
        Target(
            what=f"{name}time at MFU >= 10 %, Spearman",
            target=">= 0.95",
            reached=f"{time.spearman:.3f}",
            met=time.spearman >= 0.95,
            null=f"{null_time.spearman:.3f}",
        ),
        _at_most(f"{name}time at MFU >= 10 %, MAPE", time.mape, 0.25, null_time.mape, PEERS_TIME),
        _at_most(f"{name}mean regret", ours.mean, 0.05, null.mean, "-"),
        Target(
            what=f"{name}failed picks",
            target="0",
            reached=f"{ours.failed_picks} of {ours.decisions}",
            met=ours.failed_picks == 0,
            null=f"{null.failed_picks} of {null.decisions}",
            peers=PEERS_PICKS,
        ),
    ]


def _busy(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with an MFU of at least 10 %, the null baseline's constant fitted to them alone."""
    busy = frame[frame.mfu_pct >= 10]
    return busy.assign(null_s=null_seconds(busy))


def _at_most(what: str, reached: float, limit: float, null: float, peers: str) -> Target:
    return Target(
        what=what,
        target=f"<= {limit:.0%}".replace("%", " %"),
        reached=percent(reached),
        met=reached <= limit,
        null=percent(null),
        peers=peers,
    )


def _pair(frame: pd.DataFrame, unit: str) -> tuple[Errors, Errors]:
    measured = frame[f"measured_{unit}"]
    return errors(frame[f"predicted_{unit}"], measured), errors(frame[f"null_{unit}"], measured)


def page(
    frames: Mapping[str, pd.DataFrame],
    cells: Mapping[str, Sequence[Cell]],
    figures: Mapping[str, str],
    held_out: Sequence[str],
) -> str:
    """Markdown. `figures`: path of each table's figure by its title; `held_out`: lines on models left out of the fit."""
    parts = [
        *_opening(),
        *_target_table(targets(frames, cells)),
        *_error_table(frames, "s", "Step time"),
        *_error_table(frames, "bytes", "Memory"),
        *_sweep(frames[SWEEP]),
        *held_out,
        *_schedules(frames["pipeline_schedules"]),
        *_cells(cells),
        *_figures(figures),
        *_sources(),
    ]
    return "\n".join(parts) + "\n"


def _opening() -> list[str]:
    return [
        "# How far predictions are from what others measured",
        "",
        "`python benchmarks/published.py DIR --write docs/accuracy.md` writes this page. DIR holds tables of published "
        "measurements, which are not part of this repository; where each is from stands at the end. Predictions are those of "
        "`memadvisor estimate --table`, from the description of a row alone. Its coefficients were fitted on these tables "
        "(`benchmarks/fit_layouts.py`): this page says how well the physics with few coefficients describes them, and "
        "not how well it does elsewhere; [accuracy-unseen.md](accuracy-unseen.md) says that.",
        "",
        "A relative error is predicted / measured - 1. *MAPE*, *median* and *p90* are of its absolute value, *bias* is its mean. "
        "The *null baseline* of time is one constant rate for all rows of a table, fitted to that table, times 1F1B's bubble and 4/3 where all is "
        "recomputed; of memory, 16 bytes a parameter and 34 sbh/t a layer, times one fitted constant. *Peers* are calculon's published "
        "errors on layouts that it was not tuned on (20-40 % of time, 40 % of memory; of ten decisions ten picks that ran out of memory), "
        "on other tables than these: a bar, not a comparison row by row.",
        "",
    ]


def _target_table(rows: Sequence[Target]) -> list[str]:
    words = {True: "yes", False: "**no**", None: "not computed"}
    return [
        "## Targets",
        "",
        "| what | target | reached | met | null baseline | peers |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row.what} | {row.target} | {row.reached} | {words[row.met]} | {row.null} | {row.peers} |"
            for row in rows
        ),
        "",
    ]


def _error_table(frames: Mapping[str, pd.DataFrame], unit: str, title: str) -> list[str]:
    parts = [
        f"## {title}",
        "",
        "| table | rows | MAPE | median | p90 | bias | Spearman | null MAPE | null Spearman |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for published in TABLES:
        frame = frames[published.name]
        if not frame[f"measured_{unit}"].notna().any():
            continue
        parts.append(_error_row(published.name, *_pair(frame, unit)))
        if published.name == SWEEP and unit == "s":
            parts.append(_error_row("the same, MFU >= 10 %", *_pair(_busy(frame), unit)))
    missing = {name: int((frame.error.notna() & frame.ran).sum()) for name, frame in frames.items()}
    said = ", ".join(f"{number} of {name}" for name, number in missing.items() if number)
    return [*parts, "", f"Rows that ran and have no prediction: {said or 'none'}.", ""]


def _error_row(name: str, ours: Errors, null: Errors) -> str:
    return (
        f"| {name} | {ours.num_rows} | {percent(ours.mape)} | {percent(ours.median)} | {percent(ours.p90)} | "
        f"{ours.bias * 100:+.1f} % | {rank(ours.spearman)} | {percent(null.mape)} | {rank(null.spearman)} |"
    )


def _sweep(frame: pd.DataFrame) -> list[str]:
    everywhere = pd.Series(True, index=frame.index)
    ours, null = regret(frame, frame.predicted_s, frame.fits), regret(frame, frame.null_s, everywhere)
    parts = [
        "## The sweep of layouts: fits, and what a pick costs",
        "",
        "| | fits or not: accuracy | said to fit but failed | said not to fit but ran | decisions | mean regret | worst | failed picks | no pick |",
        "|---|---|---|---|---|---|---|---|---|",
        _decision_row("predicted", fit_judgement(frame.fits, frame.ran), ours),
        *_fewer(frame),
        _decision_row("null baseline, all said to fit", fit_judgement(everywhere, frame.ran), null),
        "",
        *decision_lines(frame),
        *_ties(frame),
        *failed_by_chance(frame),
        "### Where its error lies",
        "",
        "Of rows that ran; bias in brackets.",
        "",
    ]
    for column, title in (
        ("model", "model"),
        ("n_gpus", "accelerators"),
        ("tp", "tensor degree"),
        ("pp", "pipeline stages"),
        ("micro_batch_size", "micro-batch"),
    ):
        parts += error_by(frame, column, title)
    return [*parts, *missing_per_microbatch(frame), *apart_by_stage(frame), *common_to(frame)]


def _fewer(frame: pd.DataFrame) -> list[str]:
    """Of the decisions without those at the most accelerators, where most jobs were held up, and what holds them up is not known."""
    most = frame.n_gpus.max()
    rows = frame[frame.n_gpus < most]
    picks = regret(rows, rows.predicted_s, rows.fits)
    return [_decision_row(f"the same, below {most} accelerators", fit_judgement(rows.fits, rows.ran), picks)]


def _ties(frame: pd.DataFrame) -> list[str]:
    everywhere = pd.Series(True, index=frame.index)
    (ours, failed), (null, null_failed) = (
        shuffled_regret(frame, frame.predicted_s, frame.fits),
        shuffled_regret(frame, frame.null_s, everywhere),
    )
    return [
        "Of equal predictions the first row is the pick, and the table lists what ran quickest first: a baseline that cannot tell "
        "layouts apart profits. With the rows in random order, on average over 20: mean regret predicted "
        f"{percent(ours)}, {failed:.1f} failed picks; null baseline {percent(null)}, {null_failed:.1f} failed picks.",
        "",
    ]


def _decision_row(name: str, fits: Fits, picks: Regret) -> str:
    return (
        f"| {name} | {percent(fits.accuracy)} | {percent(fits.said_fits_but_failed)} | {percent(fits.said_oom_but_ran)} | "
        f"{picks.decisions} | {percent(picks.mean)} | {percent(picks.worst)} | {picks.failed_picks} | {picks.no_pick} |"
    )


def _schedules(frame: pd.DataFrame) -> list[str]:
    parts = [
        "## Pipeline schedules",
        "",
        "Bubble: share of the pipeline's time in which its busiest stage idles; the published ones were computed by the authors. The "
        "difference is in points of a percent.",
        "",
        "| schedule | rows | time MAPE | bias | memory MAPE | bias | bubble, mean published | predicted | mean difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in frame.groupby("schedule", sort=False):
        time, memory = (
            errors(rows.predicted_s, rows.measured_s),
            errors(rows.predicted_bytes, rows.measured_bytes),
        )
        bubble = (rows.bubble_share - rows.bubble_rate_calc).abs().mean()
        parts.append(
            f"| {name} | {len(rows)} | {percent(time.mape)} | {percent(time.bias)} | {percent(memory.mape)} | {percent(memory.bias)} | "
            f"{percent(rows.bubble_rate_calc.mean())} | {percent(rows.bubble_share.mean())} | {percent(bubble)} |"
        )
    orders = schedule_orders(frame)
    parts += [
        "",
        f"Order of schedules right in {orders.right} of {orders.groups} groups (model and microbatches).",
    ]
    if orders.wrong:
        parts.append(f"The other way round were: {'; '.join(orders.wrong)}.")
    return [*parts, ""]


def _cells(cells: Mapping[str, Sequence[Cell]]) -> list[str]:
    parts = [
        "## Tables that follow from formulas",
        "",
        "The same code as any estimate, with nothing fitted. Exact: the published figure is the predicted one rounded to its digits, to nearest "
        "or down; of figures that were digitised, within 1 %.",
        "",
        "| table | figures | exact | mean error | largest |",
        "|---|---|---|---|---|",
    ]
    for name, figures in cells.items():
        off = [abs(cell.predicted / cell.published - 1) for cell in figures]
        exact = sum(cell.is_exact for cell in figures)
        parts.append(
            f"| {name} | {len(figures)} | {exact} | {percent(sum(off) / len(off))} | {percent(max(off))} |"
        )
    parts += ["", "Those that are not exact:", ""]
    parts += [
        f"- {name}, {cell.what}: {cell.published:.4g} published, {cell.predicted:.4g} predicted"
        for name, figures in cells.items()
        for cell in figures
        if not cell.is_exact
    ]
    return [
        *parts,
        "",
        "The published states of recompute_memory are those of the layers alone: 18 bytes of 12 L h^2 / (t p) parameters give them to the last "
        "digit. The first stage that is predicted holds the embedding too.",
        "",
    ]


def _figures(figures: Mapping[str, str]) -> list[str]:
    parts = [
        "## Figures",
        "",
        "Left: each row, measured and predicted. Right: the share of rows that are off by at most so much.",
        "",
    ]
    for title, path in figures.items():
        parts += [f"![{title}]({path})", ""]
    return parts


def _sources() -> list[str]:
    named = [
        *((published.name, published.source, published.note) for published in TABLES),
        ("recompute_memory", "Korthikanti et al. 2022 (arXiv:2205.05198), figures 1 and 7, as digitised by calculon (llm/validation.py)", "Activations and states of the first stage."),
        ("zero_model_states, zero_max_model", "Rajbhandari et al. 2020 (arXiv:1910.02054), tables 1 and 2", "Analytic; 12 bytes of optimizer state a parameter."),
    ]  # fmt: skip
    return ["## Sources", "", *(f"- **{name}**: {source}. {note}" for name, source, note in named)]


def percent(share: float) -> str:
    """`12.3 %`; a dash for no number."""
    return "-" if share != share else f"{share * 100:.1f} %"


def rank(correlation: float) -> str:
    return "-" if correlation != correlation else f"{correlation:.3f}"
