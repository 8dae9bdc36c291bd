"""What checkpointing each module, or each kind of module, would free and cost."""

from __future__ import annotations

from memadvisor.analyzers.checkpointing import CheckpointedModule
from memadvisor.report.blocks import PREDICTED, Block, table
from memadvisor.report.view import RankView
from memadvisor.units import format_bytes, format_seconds

MAX_ROWS = 40
WORTH_SHOWING = 1e-3  # of the peak: a row that lowers it by less tells nobody what to do


def checkpointing_table(view: RankView) -> Block | None:
    """Modules and kinds, largest saving at the peak first; None where no call was recorded."""
    found = view.result.checkpointing
    if found is None or not found.rows:
        return None
    least_bytes = WORTH_SHOWING * found.peak_bytes
    telling = [row for row in found.rows if row.obstacle or (row.peak_saved_bytes or 0) >= least_bytes]
    shown = (telling or found.rows[:3])[:MAX_ROWS]
    more = len(found.rows) - len(shown) + found.num_left_out
    return table(
        "If checkpointed",
        ("module", "class", "frees", "lowers the peak by", "peak then in", "time added", "per GiB freed"),
        (_cells(row) for row in shown),
        kinds=(PREDICTED,),
        basis=f"{view.traced_basis}, seconds from the timed forwards",
        num_text=2,
        note="As if torch.utils.checkpoint stood around each call; * stands for every number. What it frees is not "
        "alive when the backward begins. "
        + (f"{more} more are left out: they lower the peak less, or not at all." if more else ""),
    )


def _cells(row: CheckpointedModule) -> tuple[str, ...]:
    count = f"{len(row.modules)} " if len(row.modules) > 1 else ""
    names = (row.name or "(model)", f"{count}{row.type_name}")
    if row.obstacle:
        return (*names, "-", "-", row.obstacle, "-", "-")
    freed, saved = row.freed_bytes or 0, row.peak_saved_bytes or 0
    each = row.extra_s_per_freed_gib
    return (
        *names,
        format_bytes(freed) if freed > 0 else "nothing",
        format_bytes(saved) if saved > 0 else "nothing" if not saved else f"raises it {format_bytes(-saved)}",
        row.peak_position,
        "-" if row.extra_time_s is None else format_seconds(row.extra_time_s),
        "-" if each is None else format_seconds(each),
    )
