"""Two runs side by side, as one HTML file: before and after a plan, or any other change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.run_difference import RankDifference, RunDifference
from memadvisor.report.blocks import MEASURED, Block, Html, Section, paragraph, table
from memadvisor.report.difference_cards import difference_cards, title_of_difference
from memadvisor.report.difference_kept import kept_by_module, tensors_gone
from memadvisor.report.difference_memory import memory_by_category, memory_over_both
from memadvisor.report.difference_peak import peak_bars, peak_by_unit, peak_table, peak_unit_table
from memadvisor.report.difference_states import states_of_both
from memadvisor.report.difference_time import (
    arithmetic_table,
    communication_table,
    each_step,
    operator_table,
    step_bars,
    step_table,
)
from memadvisor.report.difference_view import PairView
from memadvisor.report.difference_words import setting_text, texts
from memadvisor.report.document import document, section_html, write_page
from memadvisor.report.escape import html_text
from memadvisor.report.frame import contents_html, facts, header_html, title_html, without_script
from memadvisor.report.prediction import plan_and_prediction
from memadvisor.report.reading import alert, how_to_read
from memadvisor.report.view import RankView
from memadvisor.report.words import ranks_in_words
from memadvisor.run.run import RankRun
from memadvisor.units import format_bytes, format_seconds

MAX_DETAILED_RANKS = 8
MAX_RANKS = 256
DETAIL = 300  # see RankView.detail; what one rank may have is divided among more


def write_difference(found: RunDifference, path: Path) -> None:
    """Write the page whole or not at all, readable by its owner alone. Raises UsageError."""
    write_page(render_difference(found), path)


def render_difference(found: RunDifference) -> str:
    """The whole page."""
    figures: dict[str, object] = {}
    views = _views(found)
    sections = [*_sections(found, views), *_shared(found)]
    first = str(views[0].rank.rank) if views else ""
    body = "".join(section_html(section, first, figures) for section in sections)
    names = [Path(side.run.path).name for side in (found.before, found.after)]
    title = f"{names[0]} and {names[1]}"
    header = header_html(title, [view.rank.rank for view in views], first, len(found.ranks))
    return document(
        title,
        f'{header}<div class="page">{contents_html(sections)}<main>{_top(found)}{body}</main></div>\n',
        figures,
    )


def _views(found: RunDifference) -> list[PairView]:
    """The rank with the highest peak first, then the first ones."""
    largest = found.largest_rank
    if largest is None:
        return []
    shown = list(dict.fromkeys((largest.rank, *(rank.rank for rank in found.ranks))))[:MAX_DETAILED_RANKS]
    detail = max(40, DETAIL // len(shown))
    return [
        PairView(found, rank, _side(found.before, rank, detail), _side(found.after, rank, detail))
        for number in shown
        for rank in found.ranks
        if rank.rank == number
    ]


def _side(analysis: Analysis, rank: RankDifference, detail: int) -> RankView:
    recorded: RankRun = next(run for run in analysis.run.ranks if run.process.rank == rank.rank)
    result = next(result for result in analysis.ranks if result.rank == rank.rank)
    return RankView(analysis, recorded, result, detail)


def _sections(found: RunDifference, views: Sequence[PairView]) -> list[Section]:
    def by_rank(*makers: Callable[[PairView], Block | None]) -> dict[int, list[Block]]:
        made = {view.rank.rank: [maker(view) for maker in makers] for view in views}
        return {rank: [block for block in blocks if block is not None] for rank, blocks in made.items()}

    return [
        Section(name="answer", title="", lead="", by_rank=by_rank(difference_cards)),
        Section(
            name="settings",
            title="What differs",
            lead="Scripts, arguments, batches, plans, machines and versions that the runs do not have in common.",
            shared=[_settings(found)],
        ),
        Section(
            name="memory",
            title="Memory",
            lead="What was alive when, and what filled the two peaks.",
            by_rank=by_rank(
                memory_over_both, memory_by_category, peak_bars, peak_table, peak_by_unit, peak_unit_table
            ),
        ),
        Section(
            name="states",
            title="Model states",
            lead="Parameters, gradients and optimizer state, when the optimizer step begins.",
            by_rank=by_rank(states_of_both),
        ),
        Section(
            name="activations",
            title="Activations",
            lead="What the forward keeps for the backward in one run and not in the other.",
            by_rank=by_rank(kept_by_module, tensors_gone),
        ),
        Section(
            name="time",
            title="Step time",
            lead="Where the time of a step goes, in timed steps alone, and whether it differs by more than noise.",
            by_rank=by_rank(step_bars, step_table, each_step),
        ),
        Section(
            name="communication",
            title="Communication",
            lead="What moves between ranks, and how much of it hides behind compute.",
            by_rank=by_rank(communication_table),
        ),
        Section(
            name="arithmetic",
            title="Arithmetic",
            lead="What is computed, and in which operators.",
            by_rank=by_rank(arithmetic_table, operator_table),
        ),
    ]


def _shared(found: RunDifference) -> list[Section]:
    ranks = Section(
        name="ranks", title="Ranks", lead="Those that both runs recorded.", shared=[_ranks(found.ranks)]
    )
    reading = Section(
        name="reading",
        title="How to read this",
        lead="Every word of this page, defined.",
        shared=[how_to_read()],
    )
    plan = Section(
        name="plan",
        title="Plan and prediction",
        lead="What the plan of the run after promised beside what that run measured.",
        shared=plan_and_prediction(found.after),
    )
    return [
        *([ranks] if len(found.ranks) > 1 else []),
        *([plan] if found.after.run.plan is not None else []),
        reading,
    ]


def _settings(found: RunDifference) -> Block:
    if not found.settings:
        return paragraph("The runs do not differ in any of it.")
    return table(
        "What differs between the runs",
        ("", "before", "after"),
        (
            (setting.label, *(setting_text(setting.name, side) for side in (setting.before, setting.after)))
            for setting in found.settings
        ),
        kinds=(),
        num_text=3,
    )


def _ranks(ranks: Sequence[RankDifference]) -> Html:
    more = len(ranks) - MAX_RANKS
    return table(
        "Ranks of both runs",
        ("rank", "peak before", "after", "difference", "step before", "after", "difference"),
        (
            (
                str(rank.rank),
                *texts(rank.known_peak_bytes, format_bytes)[:3],
                *texts(rank.step_time.median_s, format_seconds)[:3],
            )
            for rank in ranks[:MAX_RANKS]
        ),
        kinds=(MEASURED,),
        basis="peak: highest of all steps; step: median steady step",
        note=f"{more} further ranks are left out." if more > 0 else "",
    )


def _top(found: RunDifference) -> str:
    runs = "".join(
        f"<b>{name}</b> <code>{html_text(str(side.run.path))}</code> {html_text(' · '.join(facts(side.run)))}<br>"
        for name, side in (("before", found.before), ("after", found.after))
    )
    return (
        f'{title_html(title_of_difference(found))}<p class="facts">{runs}</p>{_warnings(found)}{without_script()}'
        f"{alert(found.before, 'The run before')}{alert(found.after, 'The run after')}"
    )


def _warnings(found: RunDifference) -> str:
    said = []
    if not found.are_of_one_kind:
        names = ", ".join(setting.label for setting in found.settings if setting.changes_kind)
        said.append(f"The runs differ in {names}, so that what follows compares different work.")
    if found.largest_rank is None:
        said.append("No rank is recorded in both runs.")
    for ranks, side, other in (
        (found.ranks_only_before, "before", found.after),
        (found.ranks_only_after, "after", found.before),
    ):
        if ranks:
            said.append(f"Only {side}: {ranks_in_words(ranks)}, not recorded in {other.run.path}.")
    return "".join(f'<div class="alert" role="status">{html_text(text)}</div>' for text in said)
