"""Errors of models that the fit never saw: what benchmarks/fit_layouts.py --leave-one-out left, as lines of the page."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.software import NANOTRON

MOST = 1.3
# Of nanotron's preset.
FITTED_ALONG = (
    "call_s",
    "pipelined_call_s",
    "far_call_s",
    "stalled_message_s",
    "stalling_node_chance",
    "ahead_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One model of the sweep. MAPE of its step times (MFU of 10 % and more) and of its peaks: `seen` by the fit of all rows,
    `held` by one without its rows."""

    model: str
    num_times: int
    num_peaks: int
    seen_time: float
    held_time: float
    seen_memory: float
    held_memory: float


def fingerprint() -> str:
    """Of today's coefficients and of what is fitted along: where it is another one, the errors are of an earlier model."""
    today = {
        **dataclasses.asdict(FITTED),
        **{name: getattr(NANOTRON.software, name) for name in FITTED_ALONG},
    }
    return hashlib.sha256(json.dumps(today, sort_keys=True).encode()).hexdigest()[:16]


def held_out_lines(path: Path) -> list[str]:
    """Markdown; none where nothing was left out yet."""
    if not path.is_file():
        return []
    held = json.loads(path.read_text(encoding="utf-8"))
    models = [HeldOut(**one) for one in held["models"]]
    parts = [
        "### Models that the fit did not see",
        "",
        "`python benchmarks/fit_layouts.py DIR --leave-one-out --write docs/accuracy/held_out.json` fits all coefficients, and "
        "the numbers of nanotron's preset, anew without one model of the sweep (from the middle of their bounds, by the other "
        "models and the other tables), and predicts that model with them. Beside it the same fit of all rows. Times are those "
        f"of rows that are fitted to (every {held['every']}th; none at 512 accelerators) with an MFU of 10 % and more. "
        "The coefficients in use are of the same fit, begun at earlier ones, and rounded.",
        "",
        "| left out | times | MAPE, seen | left out | ratio | peaks | MAPE, seen | left out | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(one) for one in models),
        _row(_all_of(models)),
        "",
    ]
    ratios = _all_of(models)
    worst = max(ratios.held_time / ratios.seen_time, ratios.held_memory / ratios.seen_memory)
    parts += [f"To show: within {MOST:g} times. {'Met' if worst <= MOST else 'Not met'} over all models.", ""]
    if held["fingerprint"] != fingerprint():
        parts += ["These are of earlier coefficients than today's.", ""]
    return parts


def _all_of(models: list[HeldOut]) -> HeldOut:
    times, peaks = sum(one.num_times for one in models), sum(one.num_peaks for one in models)
    return HeldOut(
        model="each in turn",
        num_times=times,
        num_peaks=peaks,
        seen_time=sum(one.num_times * one.seen_time for one in models) / times,
        held_time=sum(one.num_times * one.held_time for one in models) / times,
        seen_memory=sum(one.num_peaks * one.seen_memory for one in models) / peaks,
        held_memory=sum(one.num_peaks * one.held_memory for one in models) / peaks,
    )


def _row(one: HeldOut) -> str:
    return (
        f"| {one.model} | {one.num_times} | {_percent(one.seen_time)} | {_percent(one.held_time)} | "
        f"{one.held_time / one.seen_time:.2f} | {one.num_peaks} | {_percent(one.seen_memory)} | "
        f"{_percent(one.held_memory)} | {one.held_memory / one.seen_memory:.2f} |"
    )


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
