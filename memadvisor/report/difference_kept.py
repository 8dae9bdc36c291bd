"""What is kept for the backward in one run and not in the other."""

from __future__ import annotations

from memadvisor.analyzers.run_difference import ModuleChange
from memadvisor.analyzers.saved_difference import SavedTensorChange
from memadvisor.report.blocks import MEASURED, Block, Missing, table
from memadvisor.report.difference_view import PairView
from memadvisor.report.difference_words import NOT_RECORDED, texts
from memadvisor.report.words import unit_name
from memadvisor.units import counted, format_bytes

MAX_ROWS = 60


def kept_by_module(view: PairView) -> Block:
    """All that is kept, and modules that keep more or less."""
    title = "Kept for the backward, by module"
    rank = view.rank
    if rank.modules is None:
        return Missing(
            name="both-kept",
            title=title,
            why=view.why_untraced or "Of one of the runs autograd's record is lost.",
        )
    more = len(rank.modules) - MAX_ROWS
    return table(
        title,
        ("module", "before", "after", "difference", ""),
        [
            ("kept in all", *texts(rank.saved_bytes, format_bytes)),
            *((unit_name(row.name), *_cells(row)) for row in rank.modules[:MAX_ROWS]),
        ],
        kinds=(MEASURED,),
        basis=f"one micro-batch, {view.traced_basis}",
        note="Modules that keep as much as before are left out."
        + (f" So are {more} that differ less." if more > 0 else ""),
    )


def _cells(row: ModuleChange) -> tuple[str, ...]:
    before, after, difference, share = texts(row.saved_bytes, format_bytes)
    if row.only_in == "before":
        return before, "no module", "only before", ""
    if row.only_in == "after":
        return "no module", after, "only after", ""
    return before, after, difference, share


def tensors_gone(view: PairView) -> Block | None:
    """Kinds of tensors of which fewer are kept, then those of which more are."""
    rows = view.rank.saved_tensors
    if rows is None:
        return None
    fewer = [row for row in rows if (row.saved_bytes.difference or 0) < 0]
    extra = [row for row in rows if (row.saved_bytes.difference or 0) > 0]
    return table(
        "Tensors that are no longer kept, and new ones",
        ("module", "made by", "tensor", "number before", "after", "difference"),
        [_line(row) for row in (*fewer[:MAX_ROWS], *extra[:MAX_ROWS])],
        kinds=(MEASURED,),
        basis=f"one micro-batch, {view.traced_basis}",
        num_text=3,
        note=_note(fewer, extra),
    )


def _line(row: SavedTensorChange) -> tuple[str, ...]:
    *_, difference, _ = texts(row.saved_bytes, format_bytes)
    return (
        unit_name(row.module),
        row.operator.removeprefix("aten::") or NOT_RECORDED,
        f"{row.dtype} {row.shape}, {format_bytes(row.size_bytes)}",
        str(row.num_kept.before),
        str(row.num_kept.after),
        difference,
    )


def _note(fewer: list[SavedTensorChange], extra: list[SavedTensorChange]) -> str:
    if not (fewer or extra):
        return "Both runs keep the same tensors."
    gone = -sum(row.saved_bytes.difference or 0 for row in fewer)
    new = sum(row.saved_bytes.difference or 0 for row in extra)
    shown = len(fewer[:MAX_ROWS]) + len(extra[:MAX_ROWS])
    more = len(fewer) + len(extra) - shown
    return (
        f"{format_bytes(gone)} are no longer kept, {format_bytes(new)} are new. Tensors of one module, operator, dtype and "
        "shape are one row." + (f" {counted(more, 'smaller row')} left out." if more else "")
    )
