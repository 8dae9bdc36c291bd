"""The Modules tab: the tree of modules with their bytes; Enter folds, `s` sorts siblings, `/` searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import DataTable, Static

from memadvisor.report.words import place_name
from memadvisor.tui.drawing import bar
from memadvisor.tui.pane import Pane
from memadvisor.tui.table import Column, Matcher, Row, SearchTable, matcher
from memadvisor.tui.text import module, number, paragraph, words
from memadvisor.tui.tree import TreeNode, module_tree
from memadvisor.tui.view import View
from memadvisor.units import counted, format_bytes, format_count

_BAR_WIDTH = 10
_BESIDE = 52  # columns of the screen that the figures and the bar take
_COLUMNS = (
    Column("module"),
    Column("at peak", is_number=True),
    Column(""),
    Column("saved", is_number=True),
    Column("parameters", is_number=True),
    Column("type"),
    Column("unit"),
)
# Position of the sorted column, and the key that puts the largest first. 0: the model's own order.
_SORTS: tuple[tuple[int, Callable[[TreeNode], int]], ...] = (
    (0, lambda node: 0),
    (1, lambda node: -(node.peak_bytes or 0)),
    (3, lambda node: -(node.saved_bytes or 0)),
    (4, lambda node: -node.num_parameters),
)


class ModulesPane(Pane):
    """Folded at first below the units, where models repeat themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._folded: dict[str, bool] = {}  # what the reader folded or unfolded by hand

    def content(self) -> ComposeResult:
        yield Static(id="modules-summary", markup=False)
        yield SearchTable("modules-list")

    def missing(self, view: View) -> str | None:
        if view.rank.modules:
            return None
        return "No model was seen." if view.has_ended else "No model has been seen yet."

    @on(SearchTable.Changed)
    def _changed(self) -> None:
        if self.view is not None:
            self.fill(self.view)

    @on(DataTable.RowSelected)
    def _fold(self, event: DataTable.RowSelected) -> None:
        name = event.row_key.value
        if self.view is None or name is None:
            return
        node = next((n for n in _walk(self._tree(self.view)) if _key(n) == name), None)
        if node is not None and node.children:
            self._folded[node.name] = not self._is_folded(node)
            self.fill(self.view)

    def _is_folded(self, node: TreeNode) -> bool:
        is_unit_itself = bool(node.unit) and node.name == node.unit
        return self._folded.get(node.name, is_unit_itself and node.depth > 0)

    def _tree(self, view: View) -> TreeNode:
        return module_tree(view.rank.modules, view.rank.parameters, view.result.peak, view.result.activations)

    def fill(self, view: View) -> None:
        table = self.query_one(SearchTable)
        root = self._tree(view)
        marked, key = _SORTS[table.sort % len(_SORTS)]
        query = table.query_text
        rows = self._searched(root, key, matcher(query)) if query else self._unfolded(root, key)
        self.query_one("#modules-summary", Static).update(_summary(view, len(rows)))
        largest = root.peak_bytes or 0
        shown = [_row(node, label, largest, self.size.width) for node, label in rows]
        table.fill(_COLUMNS, shown, marked)

    def _unfolded(self, node: TreeNode, key: Callable[[TreeNode], int]) -> list[tuple[TreeNode, str]]:
        folded = self._is_folded(node)
        sign = "  " if not node.children else "▸ " if folded else "▾ "
        rows = [(node, "  " * node.depth + sign + node.label)]
        if not folded:
            for child in sorted(node.children, key=key):
                rows += self._unfolded(child, key)
        return rows

    def _searched(
        self, root: TreeNode, key: Callable[[TreeNode], int], matches: Matcher
    ) -> list[tuple[TreeNode, str]]:
        """A flat list under full names, as the tree's order means nothing among the found."""
        found = [node for node in _walk(root) if matches(f"{node.name} {node.type_name}")]
        return [(node, node.name or "(model)") for node in sorted(found, key=key)]


def _walk(node: TreeNode) -> Iterator[TreeNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def _key(node: TreeNode) -> str:
    return "module " + node.name


def _summary(view: View, num_rows: int) -> Text:
    peak = view.result.peak
    at_peak = "" if peak is None else f"; at the peak, in {place_name(peak.position)}"
    return paragraph(
        (f"{counted(len(view.rank.modules), 'module')}", "bold"),
        f", {num_rows} shown{at_peak}. Bytes include the modules below.",
    )


def _row(node: TreeNode, label: str, largest_bytes: int, width: int) -> Row:
    peak_bytes = node.peak_bytes
    own = label.lstrip(" ▸▾")
    name = module(own, width, _BESIDE, before=label.removesuffix(own))
    if node.name == node.unit:
        name.stylize("bold")
    return Row(
        key=_key(node),
        cells=(
            name,
            number(format_bytes(peak_bytes) if peak_bytes is not None else "-"),
            words(bar(peak_bytes or 0, largest_bytes, _BAR_WIDTH).ljust(_BAR_WIDTH), "#4c8dff"),
            number(format_bytes(node.saved_bytes) if node.saved_bytes is not None else "-"),
            number(format_count(node.num_parameters)),
            words(node.type_name),
            words(node.unit or "(model)", "dim"),
        ),
    )
