"""The section of `memadvisor show` about want of memory: who asked, and who held it all."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from memadvisor.analyzers.analysis import Analysis
from memadvisor.analyzers.out_of_memory import way_on
from memadvisor.cli.tables import grid, heading, name_of, shorten_left
from memadvisor.tui.out_of_memory import held_by, sentence
from memadvisor.tui.text import number, paragraph, words
from memadvisor.units import format_bytes

MAX_EVENTS, MAX_MODULES = 3, 6


def out_of_memory(analysis: Analysis, width: int) -> Iterator[RenderableType]:
    """Of each rank that ran out the last event in full; earlier ones are only counted."""
    for rank in analysis.ranks[: MAX_EVENTS + 1]:
        if not rank.out_of_memory:
            continue
        event = rank.out_of_memory[-1]
        of_rank = f" on rank {rank.rank}" if len(analysis.ranks) > 1 else ""
        yield heading("Out of memory", (sentence(event, of_rank), "bold red"))
        earlier = len(rank.out_of_memory) - 1
        if earlier:
            yield paragraph((f"  {earlier} time{'s' if earlier > 1 else ''} before that in this run", "dim"))
        yield paragraph("  held by ", held_by(event))
        if event.by_module:
            lines = grid(4)
            for row in event.by_module[:MAX_MODULES]:
                lines.add_row(
                    number(format_bytes(row.size_bytes)),
                    words(row.category.replace("_", " "), "dim"),
                    words(shorten_left(name_of(row.module), max(16, width - 50))),
                )
            yield lines
        if event.hint is not None:
            yield paragraph(("  hint ", "bold"), event.hint)
    text = way_on(analysis.run)
    if text is not None:
        yield paragraph(("  next ", "bold"), text)


def short(analysis: Analysis) -> Iterator[RenderableType]:
    """Two lines for the closing summary."""
    for rank in analysis.ranks[: MAX_EVENTS + 1]:
        if rank.out_of_memory:
            event = rank.out_of_memory[-1]
            of_rank = f" on rank {rank.rank}" if len(analysis.ranks) > 1 else ""
            yield paragraph(("out of memory ", "bold red"), sentence(event, of_rank))
            yield paragraph(("held by      ", "bold"), held_by(event))
            if event.hint is not None:
                yield paragraph(("hint         ", "bold"), event.hint)
    text = way_on(analysis.run)
    if text is not None:
        yield paragraph(("next         ", "bold"), text)
