"""Tables of the tabs: filled anew without losing the reader's place, sorted and searched by keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import DataTable, Input

from memadvisor.tui.text import number, words

_MAX_WIDTH = 60  # of a column; what is longer ends in an ellipsis


@dataclass(frozen=True, slots=True)
class Column:
    """`is_number`: aligned right, as its figures are."""

    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """`key` is the row's own, so that the cursor finds it again after an update."""

    key: str
    cells: tuple[Text, ...]


def refill(table: DataTable[Text], columns: Sequence[Column], rows: Sequence[Row], marked: int = -1) -> None:
    """Show these rows; the cursor stays on its row, or on the first one if it stood there.

    `marked` is the position of the column that the rows are sorted by.
    """
    kept_key, kept_row = _cursor_key(table), table.cursor_row
    scroll_x, scroll_y = table.scroll_x, table.scroll_y
    table.clear(columns=True)
    for position, column in enumerate(columns):
        title = column.title + (" ▼" if position == marked else "")
        # Measured here: a table measures itself later, and wrongly where it is filled twice until then.
        width = max([cell_len(title), *(row.cells[position].cell_len for row in rows)])
        table.add_column(number(title) if column.is_number else words(title), width=min(width, _MAX_WIDTH))
    seen: set[str] = set()
    for row in rows:
        # A damaged run may hold a row twice, and a table takes a key once.
        table.add_row(*row.cells, key=None if row.key in seen else row.key)
        seen.add(row.key)
    if kept_row > 0 and kept_key is not None:
        found = next((i for i, row in enumerate(rows) if row.key == kept_key), min(kept_row, len(rows) - 1))
        table.move_cursor(row=max(0, found), scroll=False)
    table.scroll_to(x=scroll_x, y=scroll_y if kept_row > 0 else 0, animate=False)
    # A table as high as its rows learns of them only after this refresh.
    table.call_after_refresh(table.refresh, layout=True)


def _cursor_key(table: DataTable[Text]) -> str | None:
    if not table.is_valid_row_index(table.cursor_row):
        return None
    return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value


def row_table(identifier: str) -> DataTable[Text]:
    return DataTable(id=identifier, cursor_type="row", zebra_stripes=True)


class SearchTable(Vertical):
    """A table with a search line: `/` opens it, every letter filters, Escape empties and closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("s", "sort", "Sort"),
        Binding("escape", "clear_search", "Clear", show=False),
    ]

    class Changed(Message):
        """The reader searches for something else, or sorts otherwise: fill the table again."""

    def __init__(self, identifier: str) -> None:
        super().__init__(id=identifier)
        self.sort = 0

    def compose(self) -> ComposeResult:
        yield row_table(f"{self.id}-table")
        search = Input(placeholder="part of a name; Enter: to the table, Escape: all rows", compact=True)
        search.display = False
        yield search

    @property
    def table(self) -> DataTable[Text]:
        return self.query_one(DataTable)

    @property
    def query_text(self) -> str:
        return self.query_one(Input).value.strip().casefold()

    def fill(self, columns: Sequence[Column], rows: Sequence[Row], marked: int = -1) -> None:
        refill(self.table, columns, rows, marked)

    def action_search(self) -> None:
        search = self.query_one(Input)
        search.display = True
        search.focus()

    def action_clear_search(self) -> None:
        search = self.query_one(Input)
        search.value = ""
        search.display = False
        self.table.focus()

    def action_sort(self) -> None:
        self.sort += 1
        self.post_message(self.Changed())

    @on(Input.Changed)
    def _search_changed(self, event: Input.Changed) -> None:
        event.stop()
        self.post_message(self.Changed())

    @on(Input.Submitted)
    def _search_done(self, event: Input.Submitted) -> None:
        event.stop()
        if not event.value:
            self.query_one(Input).display = False
        self.table.focus()


Matcher = Callable[[str], bool]


def matcher(query: str) -> Matcher:
    """Every word of the query must occur somewhere in the text."""
    parts = query.casefold().split()
    return lambda text: all(part in text.casefold() for part in parts)
