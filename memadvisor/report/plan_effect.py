"""What the applied plan did, at a glance: without it, predicted and measured, and what it does to results."""

from __future__ import annotations

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.comparison import Compared, Comparison
from memadvisor.plan_words import results_text
from memadvisor.report.blocks import MEASURED, PREDICTED, kinds_html
from memadvisor.report.escape import html_text, prose
from memadvisor.units import counted, format_bytes, format_change, format_seconds


def effect_in_words(compared: Comparison) -> str | None:
    """`Without the plan: peak 279 MiB, step 1.85 s, measured on 2 ranks. With it: peak -36.2 %, step +17.3 %.`"""
    plain = compared.plain
    if plain is None:
        return None
    before = f"peak {format_bytes(plain.peak_bytes)}, step {format_seconds(plain.step_time_s)}"
    changes = [
        f"{name} {format_change(fraction)}"
        for name, fraction in (
            ("peak", _change(compared.peak_bytes.measured, plain.peak_bytes)),
            ("step", _change(compared.step_time_s.measured, plain.step_time_s)),
        )
        if fraction is not None
    ]
    with_it = f" With it: {', '.join(changes)}." if changes else ""
    return f"Without the plan: {before}, measured on {counted(plain.num_ranks, 'rank')}.{with_it}"


def results_in_words(analysis: Analysis) -> str:
    """Losses are not recorded, so it is what the plan is made to do, and says so."""
    plan = analysis.run.plan
    return "" if plan is None else f"Results are by design {results_text(plan)}; losses are not recorded."


def _change(after: float | None, before: float) -> float | None:
    return None if after is None or not before else (after - before) / before


def plan_card(analysis: Analysis) -> str:
    """The card across the page; nothing without a prediction."""
    compared = analysis.comparison
    if compared is None or compared.peak_bytes.measured is None:
        return ""
    errors = [f"peak {_error(compared.peak_bytes)}"]
    if compared.step_time_s.error_fraction is not None and not compared.unsteady:
        errors.append(f"step {_error(compared.step_time_s)}")
    words = [results_in_words(analysis)]
    if compared.budget_bytes is not None:
        held = "held" if compared.within_budget else "did not hold"
        words.insert(0, f"The budget of {format_bytes(compared.budget_bytes)} {held}.")
    if compared.unsteady_in_words is not None:
        words.append(compared.unsteady_in_words)
    return (
        '<div class="cards"><div class="card wide"><div class="name">Plan: error of what was predicted</div>'
        f'<div class="value">{html_text(", ".join(errors))}</div>{_table(compared)}'
        f'<p class="note">{prose(" ".join(words))}</p></div></div>'
    )


def _error(pair: Compared) -> str:
    return "not known" if pair.error_fraction is None else format_change(pair.error_fraction)


def _table(compared: Comparison) -> str:
    plain, peak, step = compared.plain, compared.peak_bytes, compared.step_time_s
    rows = [
        ("with the plan", PREDICTED, peak.predicted, step.predicted),
        ("with the plan", MEASURED, peak.measured, step.measured),
    ]
    head = '<tr><th></th><th class="number">peak</th><th class="number">step time</th></tr>'
    body = ""
    if plain is not None:
        name = f"without the plan, {counted(plain.num_ranks, 'rank')}"
        body = _row(name, MEASURED, format_bytes(plain.peak_bytes), format_seconds(plain.step_time_s))
    for name, kind, peak_bytes, step_s in rows:
        peak_text = format_bytes(peak_bytes) + _against(
            peak_bytes, None if plain is None else plain.peak_bytes
        )
        step_text = format_seconds(step_s) + _against(step_s, None if plain is None else plain.step_time_s)
        body += _row(name, kind, peak_text, step_text)
    return (
        f'<div class="scroll"><table class="effect"><thead>{head}</thead><tbody>{body}</tbody></table></div>'
    )


def _against(value: float | None, plain: float | None) -> str:
    """By how much it differs from the run without the plan, in brackets."""
    change = None if plain is None else _change(value, plain)
    return "" if change is None else f" ({format_change(change)})"


def _row(name: str, kind: str, peak: str, step: str) -> str:
    numbers = "".join(f'<td class="number">{html_text(cell)}</td>' for cell in (peak, step))
    return f"<tr><td>{html_text(name)} {kinds_html((kind,))}</td>{numbers}</tr>"
