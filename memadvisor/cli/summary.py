"""The sections of `memadvisor show`, each from the analysis to something that rich prints.

Every word from the user's program goes through memadvisor.tui.text, which never reads markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.comparison import Compared
from memadvisor.cli.summary_allocator import allocator
from memadvisor.cli.summary_arithmetic import operators, roofline, utilization
from memadvisor.cli.summary_checkpointing import checkpointing
from memadvisor.cli.summary_failures import out_of_memory
from memadvisor.cli.summary_memory import model_states, modules, peak
from memadvisor.cli.summary_script import script_changes
from memadvisor.cli.summary_time import communication, ranks, step_time, units
from memadvisor.cli.tables import heading, table
from memadvisor.report.plan_effect import effect_in_words, results_in_words
from memadvisor.report.words import clock_time, ranks_in_words, steps_in_words, unfinished_in_words
from memadvisor.tui.text import number, paragraph, words
from memadvisor.units import format_bytes, format_change, format_seconds

MAX_NAMED = 16


def sections(analysis: Analysis, width: int, *, has_color: bool, convention: str) -> Iterator[RenderableType]:
    """All sections, in the order in which a reader asks; details are of the rank with the highest peak."""
    rank = analysis.largest_rank
    recorded = analysis.run.rank(rank.rank)
    yield header(analysis)
    yield from trouble(analysis)
    yield from out_of_memory(analysis, width)
    if analysis.comparison is not None:
        yield prediction(analysis)
    yield peak(rank, recorded, len(analysis.ranks), width, has_color=has_color)
    yield from larger(analysis)
    if rank.peak is not None:
        yield modules(rank.peak, width)
    if rank.fragmentation is not None and rank.fragmentation.is_worth_showing:
        yield allocator(rank.fragmentation)
    if rank.checkpointing is not None and rank.checkpointing.best(1):
        yield checkpointing(rank.checkpointing, width)
    if rank.script_changes:
        yield script_changes(rank.script_changes)
    yield model_states(rank.model_states)
    yield step_time(analysis, rank, width)
    yield utilization(rank.utilization, recorded, convention)
    yield units(rank, recorded, width)
    if rank.roofline is not None and rank.roofline.ridge_flops_per_byte is not None:
        yield roofline(rank.roofline, width)
    if rank.operators is not None:
        yield operators(rank.operators, width)
    yield communication(rank, analysis)
    if analysis.skew is not None:
        yield ranks(analysis)


def larger(analysis: Analysis) -> Iterator[RenderableType]:
    """Where the peak is not that of the largest step."""
    if analysis.larger_steps is not None:
        yield paragraph(("larger steps ", "bold yellow"), analysis.larger_steps.in_words)


def header(analysis: Analysis) -> RenderableType:
    run = analysis.run
    process = run.ranks[0].process
    num_ranks = max(run.manifest.world_size, len(run.ranks) + len(run.missing_ranks))
    command = " ".join((run.manifest.script, *run.manifest.arguments))
    traced = run.ranks[0].traced_step
    facts = (
        f"{num_ranks} rank{'s' if num_ranks > 1 else ''} on {process.device_name} ({process.device})",
        f"torch {process.torch_version}",
        steps_in_words(run),
        "none traced" if traced is None else f"step {traced.index} traced",
    )
    return Group(paragraph((command, "bold"), "  ", ending(analysis)), paragraph((" | ".join(facts), "dim")))


def ending(analysis: Analysis) -> tuple[str, str]:
    """How the run ended, with the color that fits."""
    run = analysis.run
    endings = [rank.ending for rank in run.ranks]
    failed = next((end for end in endings if end is not None and (end.exit_code or end.exception)), None)
    if failed is not None:
        raised = "" if failed.exception is None else f" ({failed.exception})"
        return f"exit code {failed.exit_code}{raised}", "bold red"
    if not run.is_finished:
        if not run.missing_ranks and all(rank.has_stopped for rank in analysis.unfinished_ranks):
            return "not recorded to its end", "bold yellow"
        alive = {rank.is_alive for rank in analysis.unfinished_ranks}
        if False in alive:
            last_s = max(
                rank.last_seen_unix_s for rank in analysis.unfinished_ranks if rank.is_alive is False
            )
            return f"ended without a word (killed?), last record {clock_time(last_s)}", "bold red"
        if not analysis.unfinished_ranks:
            return "exit code 0 on the ranks that left a record", "bold yellow"
        is_running = alive == {True} and not run.missing_ranks
        return "still running" if is_running else "no ending: killed, or still running", "bold yellow"
    return "exit code 0", "green"


def trouble(analysis: Analysis) -> Iterator[RenderableType]:
    """Missing and unfinished ranks, damage and what the recorder noted, each on a line."""
    run = analysis.run
    if run.missing_ranks:
        named = ", ".join(str(rank) for rank in run.missing_ranks[:MAX_NAMED])
        more = len(run.missing_ranks) - MAX_NAMED
        yield paragraph(
            ("missing ", "bold yellow"),
            f"rank {named}",
            f" and {more} more" if more > 0 else "",
            ": no record",
        )
    if len(run.ranks) + len(run.missing_ranks) > 1:
        for late in analysis.unfinished_ranks[:MAX_NAMED]:
            yield paragraph(("unfinished ", "bold yellow"), f"rank {late.rank}: {unfinished_in_words(late)}")
    for problem in run.problems:
        yield paragraph(("problem ", "bold yellow"), problem)
    told: dict[tuple[str, str], list[int]] = {}
    for rank in run.ranks:
        for note in rank.notes:
            told.setdefault((note.level, note.text), []).append(rank.process.rank)
    for (level, text), of_ranks in told.items():
        style = {"error": "bold red", "warning": "bold yellow"}.get(level, "bold")
        where = "" if len(of_ranks) == len(run.ranks) else f" ({ranks_in_words(of_ranks)})"
        yield paragraph((f"{level} ", style), text, where)


def prediction(analysis: Analysis) -> RenderableType:
    compared = analysis.comparison
    assert compared is not None
    title = heading("Prediction", "the plan's figures beside this run's, of the largest and slowest rank")
    lines = table("", "predicted", "measured", "error")
    lines.add_row(words("peak", "bold"), *_compared(compared.peak_bytes, in_bytes=True))
    for rank, pair in compared.rank_peak_bytes.items():
        lines.add_row(words(f"  rank {rank}", "dim"), *_compared(pair, in_bytes=True))
    if compared.reserved_bytes.predicted is not None:
        lines.add_row(words("reserved", "bold"), *_compared(compared.reserved_bytes, in_bytes=True))
    for name, pair in compared.shown_by_category_bytes.items():
        lines.add_row(words("  " + name.replace("_", " "), "dim"), *_compared(pair, in_bytes=True))
    lines.add_row(words("step time", "bold"), *_compared(compared.step_time_s, in_bytes=False))
    for name, pair in compared.components_s.items():
        lines.add_row(words("  " + name.replace("_", " "), "dim"), *_compared(pair, in_bytes=False))
    notes = [paragraph("  ", (each, "bold yellow")) for each in compared.remarks]
    effect = [
        paragraph("  ", each) for each in (effect_in_words(compared), results_in_words(analysis)) if each
    ]
    return Group(title, lines, *notes, *_budget(analysis), *effect)


def _budget(analysis: Analysis) -> Sequence[RenderableType]:
    compared = analysis.comparison
    if compared is None or compared.budget_bytes is None or compared.within_budget is None:
        return ()
    budget = format_bytes(compared.budget_bytes)
    if compared.within_budget:
        return (paragraph(f"  the budget of {budget} ", ("held", "bold green")),)
    return (paragraph(f"  the budget of {budget} ", ("did not hold", "bold red")),)


def _compared(pair: Compared, *, in_bytes: bool) -> tuple[Text, Text, Text]:
    form = format_bytes if in_bytes else format_seconds
    return (
        number("-" if pair.predicted is None else form(pair.predicted)),
        number(form(pair.measured)),
        number(format_change(pair.error_fraction)),
    )
