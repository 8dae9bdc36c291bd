"""The report: one HTML file with everything in it, which needs no network and asks for none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.matching import match_collectives
from memadvisor.report.allocator import fragmented_segments, reserved_memory
from memadvisor.report.arithmetic import operators_table, roofline_figure, roofline_table
from memadvisor.report.blocks import Block, Section
from memadvisor.report.checkpointing import checkpointing_table
from memadvisor.report.counters import counters_over_run
from memadvisor.report.document import document, section_html, write_page
from memadvisor.report.escape import html_text
from memadvisor.report.failures import out_of_memory_box
from memadvisor.report.frame import contents_html, facts, header_html, title_html, without_script
from memadvisor.report.headline import headline, title_of
from memadvisor.report.lifetimes import activation_lifetimes, saved_by_unit
from memadvisor.report.memory import memory_over_time
from memadvisor.report.peak_modules import largest_storages, peak_by_module
from memadvisor.report.prediction import plan_and_prediction
from memadvisor.report.ranks import rank_skew
from memadvisor.report.reading import alert, how_to_read, notes_and_problems
from memadvisor.report.script_changes import script_change_list, script_change_section
from memadvisor.report.states import model_state_table
from memadvisor.report.times import every_step, step_waterfall, unit_times
from memadvisor.report.traffic import (
    bandwidth_table,
    communication_lanes,
    group_table,
    traffic_summary,
    unit_table,
)
from memadvisor.report.view import RankView
from memadvisor.run.run import Run

MAX_DETAILED_RANKS = 16
DETAIL = 300  # see RankView.detail; what two ranks may have is divided among more


def write_report(analysis: Analysis, path: Path) -> None:
    """Write the page whole or not at all, readable by its owner alone. Raises UsageError."""
    write_page(render(analysis), path)


def render(analysis: Analysis) -> str:
    """The whole page."""
    figures: dict[str, object] = {}
    sections = _sections(analysis)
    first = str(analysis.largest_rank.rank)
    body = "".join(section_html(section, first, figures) for section in sections)
    run = analysis.run
    return document(
        Path(run.manifest.script).name,
        f"{header_html(_command(run), [view.result.rank for view in _views(analysis)], first, len(analysis.ranks))}"
        f'<div class="page">{contents_html(sections)}<main>{_top(analysis)}{body}{_footer(run)}</main></div>\n',
        figures,
    )


def _sections(analysis: Analysis) -> list[Section]:
    """In the order of the page: what each rank measured, then what is of all ranks, then what helps to read it."""
    return [*_measured_sections(analysis), *_shared_sections(analysis)]


def _measured_sections(analysis: Analysis) -> list[Section]:
    views = _views(analysis)
    matched = match_collectives(analysis.run.ranks)

    def by_rank(*makers: Callable[[RankView], Block | None]) -> dict[int, list[Block]]:
        made = {view.result.rank: [maker(view) for maker in makers] for view in views}
        return {rank: [block for block in blocks if block is not None] for rank, blocks in made.items()}

    return [
        Section(name="answer", title="", lead="", by_rank=by_rank(headline)),
        Section(
            name="memory",
            title="Memory",
            lead="What was alive when, and what filled the peak.",
            by_rank=by_rank(
                memory_over_time, peak_by_module, largest_storages, reserved_memory, fragmented_segments
            ),
        ),
        Section(
            name="states",
            title="Model states",
            lead="Parameters, gradients and optimizer state: what theory asks for beside what is there.",
            by_rank=by_rank(model_state_table),
        ),
        Section(
            name="activations",
            title="Activations",
            lead="What the forward keeps for the backward, by which unit, and for how long.",
            by_rank=by_rank(activation_lifetimes, saved_by_unit, checkpointing_table),
        ),
        script_change_section(analysis, by_rank(script_change_list)),
        Section(
            name="time",
            title="Step time",
            lead="Where the time of a step goes, in timed steps alone.",
            by_rank=by_rank(step_waterfall, unit_times, every_step, counters_over_run),
        ),
        Section(
            name="arithmetic",
            title="Arithmetic",
            lead="How far arithmetic and memory traffic are from what the hardware can do, and in which operators.",
            by_rank=by_rank(roofline_figure, roofline_table, operators_table),
        ),
        Section(
            name="communication",
            title="Communication",
            lead="What moves between ranks, how much of it hides behind compute, and who waits.",
            by_rank=by_rank(
                traffic_summary,
                lambda view: communication_lanes(view, matched),
                bandwidth_table,
                group_table,
                unit_table,
            ),
        ),
    ]


def _shared_sections(analysis: Analysis) -> list[Section]:
    return [
        Section(
            name="ranks",
            title="Ranks",
            lead="How unlike the ranks are.",
            shared=rank_skew(analysis),
        ),
        Section(
            name="plan",
            title="Plan and prediction",
            lead="What the applied plan promised beside what this run measured.",
            shared=plan_and_prediction(analysis),
        ),
        Section(
            name="notes",
            title="Notes and problems",
            lead="What the recorder could not see, and what of this run is damaged or absent.",
            shared=notes_and_problems(analysis),
        ),
        Section(
            name="reading",
            title="How to read this",
            lead="Every word of this page, defined.",
            shared=[how_to_read()],
        ),
    ]


def _views(analysis: Analysis) -> list[RankView]:
    """The ranks shown in detail: all, or of very many the fullest, the awaited one and the first ones."""
    chosen = [analysis.largest_rank.rank]
    if analysis.skew is not None and analysis.skew.straggler is not None:
        chosen.append(analysis.skew.straggler)
    chosen += [rank.rank for rank in analysis.ranks]
    shown = set(list(dict.fromkeys(chosen))[:MAX_DETAILED_RANKS])
    detail = max(40, DETAIL if len(shown) <= 2 else 2 * DETAIL // len(shown))
    return [
        RankView(analysis, recorded, result, detail)
        for recorded, result in zip(analysis.run.ranks, analysis.ranks, strict=True)
        if result.rank in shown
    ]


def _command(run: Run) -> str:
    return " ".join((run.manifest.script, *run.manifest.arguments))


def _top(analysis: Analysis) -> str:
    told = " · ".join(facts(analysis.run))
    return (
        f"{title_html(title_of(analysis))}"
        f'<p class="facts"><code>{html_text(_command(analysis.run))}</code><br>{html_text(told)}</p>'
        f"{alert(analysis)}{without_script()}"
        f"{out_of_memory_box(analysis)}"
    )


def _footer(run: Run) -> str:
    where = html_text(str(run.path))
    version = html_text(run.manifest.memadvisor_version)
    return (
        f"<footer>Recorded by memadvisor {version} in <code>{where}</code>. This file loads nothing.</footer>"
    )
