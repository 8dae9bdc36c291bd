"""The lines of `memadvisor show` about what checkpointing would bring."""

from __future__ import annotations

from rich.console import Group, RenderableType

from memadvisor.analyzers.checkpointing import CheckpointedModule, Checkpointing
from memadvisor.cli.tables import grid, heading, shorten_left
from memadvisor.tui.text import number, words
from memadvisor.units import format_bytes, format_fraction, format_seconds

_NUM_SHOWN = 4


def checkpointing(found: Checkpointing, width: int) -> RenderableType:
    """The few checkpoints that lower the peak most for their time."""
    lines = grid(5)
    for row in found.best(_NUM_SHOWN):
        share = (row.peak_saved_bytes or 0) / found.peak_bytes
        lines.add_row(
            words(label(row, max(16, width // 3))),
            number(f"-{format_bytes(row.peak_saved_bytes or 0)}"),
            number(format_fraction(share)),
            number("" if row.extra_time_s is None else f"+{format_seconds(row.extra_time_s)}"),
            words(f"peak then in {row.peak_position}", "dim"),
        )
    return Group(heading("If checkpointed", "predicted: lower peak of a step, time it adds"), lines)


def label(row: CheckpointedModule, width: int) -> str:
    """`blocks.*.mlp (4 Sequential)`, `blocks.3 (Block)`; in so few characters that a long class gives way first."""
    count = f"{len(row.modules)} " if len(row.modules) > 1 else ""
    name = row.name or "(model)"
    room = max(8, width - len(f"{name} ({count})"))
    kind = row.type_name if len(row.type_name) <= room else row.type_name[: room - 3] + "..."
    return shorten_left(f"{name} ({count}{kind})", width)
