"""What to change in the script itself, and what each change alone would save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.report.blocks import MEASURED, PREDICTED, Block, Html, Section, kinds_html, paragraph
from memadvisor.report.escape import html_text, html_with_code
from memadvisor.report.view import RankView


def script_change_section(analysis: Analysis, by_rank: Mapping[int, Sequence[Block]]) -> Section:
    """The changes of each rank; where none has any, one sentence for all."""
    return Section(
        name="script",
        title="Change in the script",
        lead="What a few words in the script itself would save, each by itself. Those that a plan can do as well say so.",
        shared=() if any(by_rank.values()) else (paragraph(_why_none(analysis)),),
        by_rank=by_rank,
    )


def script_change_list(view: RankView) -> Block | None:
    """The changes, the most telling first; None where there is none."""
    if not view.result.script_changes:
        return None
    items = "".join(_item(change) for change in view.result.script_changes)
    kinds = kinds_html((MEASURED, PREDICTED), view.traced_basis)
    return Html(
        f'<figure class="table"><figcaption><h3>Changes</h3>{kinds}</figcaption><ul>{items}</ul></figure>'
    )


def _item(change: ScriptChange) -> str:
    saved = change.saved_in_words
    predicted = f"<b>{html_text(saved)}</b>: " if saved else ""
    return f"<li>{predicted}{html_with_code(change.seen)} {html_with_code(change.change_in_words)}</li>"


def _why_none(analysis: Analysis) -> str:
    if analysis.run.plan is not None:
        return "A plan was applied here: what the script itself wastes is read from a run without one."
    if analysis.run.traced_step is None:
        return "Not recorded: no step was traced."
    if all(rank.has_lost_trace for rank in analysis.run.ranks if rank.traced_step is not None):
        return "Not recorded: the traced step's record is lost."
    return (
        "None found. Looked for: results that variables hold beyond their use, attention weights kept for the backward, "
        "gradients kept through the forward or held twice, reductions in every micro-batch, optimizers that are not fused, waiting for data, "
        "float32 where a GPU is much faster in less, memory that grows from step to step."
    )
