"""The Activations tab: every storage that autograd kept for the backward, by whom and for how long."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import Static

from memadvisor.analyzers.activations import Activations, Lifetime
from memadvisor.analyzers.checkpointing import Checkpointing
from memadvisor.tui.drawing import CATEGORY_COLORS
from memadvisor.tui.pane import Pane, why_untraced
from memadvisor.tui.table import Column, Row, SearchTable, matcher
from memadvisor.tui.text import module, number, operator, paragraph, words
from memadvisor.tui.view import View
from memadvisor.units import format_bytes, format_seconds

_BESIDE = 64  # columns of the screen that bytes, times and operator take
_NUM_SHOWN = 1000
_COLUMNS = (
    Column("bytes", is_number=True),
    Column("module"),
    Column("born", is_number=True),
    Column("kept", is_number=True),
    Column("released", is_number=True),
    Column("operator"),
    Column("saved by"),
    Column("also kept by"),
    Column("shape"),
    Column("dtype"),
    Column("category"),
)
# Position of the sorted column, what it is called, and the key that puts the most interesting first.
_SORTS: tuple[tuple[int, Callable[[Lifetime], float | str]], ...] = (
    (0, lambda life: -life.size_bytes),
    (1, lambda life: life.module),
    (2, lambda life: life.born_s),
    (3, lambda life: -(life.kept_s or 0.0)),
)


class ActivationsPane(Pane):
    """A searchable table of lifetimes; `s` goes round bytes, module, birth and time kept."""

    def content(self) -> ComposeResult:
        yield Static(id="activations-summary", markup=False)
        yield SearchTable("activations-list")

    def missing(self, view: View) -> str | None:
        return why_untraced(view) if view.result.activations is None else None

    @on(SearchTable.Changed)
    def _changed(self) -> None:
        if self.view is not None:
            self.fill(self.view)

    def fill(self, view: View) -> None:
        found = view.result.activations
        if found is None:
            return
        table = self.query_one(SearchTable)
        matches = matcher(table.query_text)
        chosen = [life for life in found.lifetimes if matches(f"{life.module} {life.operator} {life.shape}")]
        marked, key = _SORTS[table.sort % len(_SORTS)]
        chosen.sort(key=key)
        self.query_one("#activations-summary", Static).update(
            _summary(found, view.result.checkpointing, len(chosen))
        )
        table.fill(_COLUMNS, [_row(life, self.size.width) for life in chosen[:_NUM_SHOWN]], marked)


def _summary(found: Activations, checkpoints: Checkpointing | None, num_chosen: int) -> Text:
    shown = f"{min(num_chosen, _NUM_SHOWN)} of {len(found.lifetimes)} shown"
    return paragraph(
        (format_bytes(found.saved_bytes), "bold #2ec4a6"),
        f" kept for the backward by one micro-batch, parameters not counted{_moved(found)}; {shown}",
        *_checkpoint(checkpoints),
    )


def _others(life: Lifetime) -> str:
    """Who else keeps it alive, whatever became of the module's own save."""
    outside = ("(outside autograd)",) if life.is_held_elsewhere else ()
    return ", ".join((*(name or "(model)" for name in life.other_modules), *outside))


def _moved(found: Activations) -> str:
    return (
        f", {format_bytes(found.moved_bytes)} of it away on another tier in between"
        if found.moved_bytes
        else ""
    )


def _form(life: Lifetime) -> str:
    """Its dtype; and of what a plan keeps or has moved, what it is."""
    if life.original_bytes is not None:
        return f"{life.dtype}, codes of {format_bytes(life.original_bytes)}"
    return life.dtype if life.returned_of is None else f"{life.dtype}, back from another tier"


def _checkpoint(found: Checkpointing | None) -> tuple[str, ...]:
    """The one checkpoint that lowers the peak most, in a line; nothing where none does."""
    best = found.best(1) if found is not None else ()
    if not best:
        return ()
    row = best[0]
    time = "" if row.extra_time_s is None else f", adding {format_seconds(row.extra_time_s)} a step"
    return (
        f"; if {row.name or '(model)'} were checkpointed the peak would fall by "
        f"{format_bytes(row.peak_saved_bytes or 0)}{time} (predicted)",
    )


def _row(life: Lifetime, width: int) -> Row:
    return Row(
        key=str(life.storage_id),
        cells=(
            number(format_bytes(life.size_bytes)),
            module(life.module, width, _BESIDE),
            number(format_seconds(life.born_s)),
            number(format_seconds(life.kept_s) if life.kept_s is not None else "-"),
            number(format_seconds(life.released_s) if life.released_s is not None else "-"),
            operator(life.operator),
            words(", ".join(name.removeprefix("aten::") for name in life.saved_by)),
            words(_others(life)),
            words(life.shape),
            words(_form(life)),
            words(life.category, CATEGORY_COLORS.get(life.category, "")),
        ),
    )
