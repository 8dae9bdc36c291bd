"""What filled the peak, by unit, module and category, and the largest storages in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memadvisor.analyzers.peak import PeakBreakdown
from memadvisor.category_words import category_name
from memadvisor.report.blocks import MEASURED, Block, Figure, Missing, table
from memadvisor.report.escape import plotly_text, shortened
from memadvisor.report.lanes import text_on
from memadvisor.report.view import RankView
from memadvisor.report.words import STACK, color_of, place_name, unit_name
from memadvisor.run.records import UNEXPLAINED, Storage
from memadvisor.units import format_bytes, format_seconds

NUM_LARGEST_SHOWN = 12
_NO_MODULE = "(no module)"


def peak_by_module(view: RankView) -> Block:
    """A treemap: unit, module, category."""
    title = "At the peak, by unit and module"
    peak = view.result.peak
    if peak is None:
        return Missing(name="peak-modules", title=title, why=view.why_untraced)
    tiles = _Tiles()
    for row in _foreground(peak, view.detail):
        tiles.add(*row)
    if peak.unexplained_bytes > 0:
        tiles.add(UNEXPLAINED, "", UNEXPLAINED, peak.unexplained_bytes)
    sizes = {**peak.by_category_bytes, UNEXPLAINED: peak.unexplained_bytes}
    below = -peak.unexplained_bytes
    return Figure(
        name="peak-modules",
        title=title,
        kinds=(MEASURED,),
        basis=view.traced_basis,
        label=f"Treemap of the {format_bytes(peak.allocated_bytes)} alive at the peak.",
        traces=[tiles.trace(peak.allocated_bytes)],
        layout={
            "margin": {"t": 20, "l": 2, "r": 2, "b": 2},
            "uniformtext": {"minsize": 9, "mode": "hide"},
        },
        height_px=460,
        legend=[(category_name(c), color_of(c)) for c in STACK if sizes.get(c, 0) > 0],
        note="Each tile's area is its bytes. A storage belongs to the innermost module that ran when it was born; "
        "colors are those of the categories. Click a unit to look inside."
        + (
            f" The storages sum to {format_bytes(below)} more than the allocator's peak." if below > 0 else ""
        ),
    )


def _foreground(peak: PeakBreakdown, num_tiles: int) -> Iterator[tuple[str, str, str, int]]:
    """(unit, module inside it, category, bytes); the smallest of a unit, beyond `num_tiles`, together."""
    rest: dict[tuple[str, str], int] = {}
    for position, row in enumerate(peak.by_module):
        # "(AveragedModel)" is of no model that is trained.
        of_none = row.module if row.module.startswith("(") else unit_name("")
        unit = row.unit or (of_none if row.module else _NO_MODULE)
        inside = row.module.removeprefix(row.unit).removeprefix(".") if row.unit else row.module
        own_bytes = 0 if row.unit or row.module else peak.by_root_bytes.get(row.category, 0)
        for label, size_bytes in ((unit_name(""), own_bytes), (unit, row.size_bytes - own_bytes)):
            if position < num_tiles:
                yield label, inside, row.category, size_bytes
            else:
                rest[label, row.category] = rest.get((label, row.category), 0) + size_bytes
    for (unit, category), size_bytes in rest.items():
        yield unit, "(smaller modules)", category, size_bytes


class _Tiles:
    """The treemap's nodes: units, modules inside them, and categories as leaves."""

    def __init__(self) -> None:
        self._units: dict[str, dict[str, list[tuple[str, int]]]] = {}

    def add(self, unit: str, module: str, category: str, size_bytes: int) -> None:
        if size_bytes > 0:
            self._units.setdefault(unit, {}).setdefault(module, []).append((category, size_bytes))

    def trace(self, allocated_bytes: int) -> dict[str, Any]:
        # Positions, not names, are the ids: names are the user's, and may be equal or hold anything.
        nodes: list[tuple[str, str, str, int, str]] = []  # id, parent, label, bytes, color
        for u, (unit, modules) in enumerate(self._units.items()):
            unit_bytes = sum(size for parts in modules.values() for _, size in parts)
            if unit == UNEXPLAINED and list(modules) == [""]:
                nodes.append((f"u{u}", "root", UNEXPLAINED, unit_bytes, color_of(UNEXPLAINED)))
                continue
            nodes.append((f"u{u}", "root", unit, unit_bytes, "var(--tile)"))
            for m, (module, parts) in enumerate(modules.items()):
                parent = f"u{u}"
                if module:
                    parent = f"u{u}m{m}"
                    nodes.append((parent, f"u{u}", module, sum(size for _, size in parts), "var(--tile)"))
                nodes += [
                    (f"u{u}m{m}c{c}", parent, category_name(category), size, color_of(category))
                    for c, (category, size) in enumerate(parts)
                ]
        total = sum(node[3] for node in nodes if node[1] == "root")
        nodes.insert(0, ("root", "", f"peak {format_bytes(allocated_bytes)}", total, "var(--card)"))
        return _treemap(nodes)


def _treemap(nodes: Sequence[tuple[str, str, str, int, str]]) -> dict[str, Any]:
    leaf_colors = {color_of(category) for category in STACK}
    return {
        "type": "treemap",
        "ids": [node[0] for node in nodes],
        "parents": [node[1] for node in nodes],
        "labels": [plotly_text(shortened(node[2], 34)) for node in nodes],
        "values": [node[3] for node in nodes],
        "text": [format_bytes(node[3]) for node in nodes],
        "branchvalues": "total",
        "marker": {
            "colors": [node[4] for node in nodes],
            "line": {"width": 1, "color": "var(--card)"},
            "pad": {"t": 19, "l": 2, "r": 2, "b": 2},
        },
        # A unit or module has one line above its tiles, a tile has room for two.
        "texttemplate": [
            "%{label}<br>%{text}" if node[4] in leaf_colors else "%{label} %{text}" for node in nodes
        ],
        "textfont": {"color": [_text_on(node[4]) for node in nodes]},
        "hovertemplate": "%{label}<br>%{text}, %{percentRoot:.1%} of the peak<extra></extra>",
        "tiling": {"packing": "squarify", "pad": 1},
        "maxdepth": 4,
        "pathbar": {"visible": True, "side": "top"},
    }


def _text_on(color: str) -> str:
    """Tiles of a unit or module, and the peak around them, are as pale or dark as the page."""
    return "var(--text)" if color in ("var(--tile)", "var(--card)") else text_on(color)


def largest_storages(view: RankView) -> Block | None:
    """What one would look for first: the largest tensors alive at the peak."""
    peak = view.result.peak
    if peak is None:
        return None
    return table(
        "Largest storages at the peak",
        ("module", "category", "made by", "tensor", "bytes"),
        (
            (
                storage.place or root_or_none(storage),
                category_name(storage.category),
                _maker(storage),
                f"{storage.dtype} {storage.shape}".strip(),
                format_bytes(storage.size_bytes),
            )
            for storage in peak.largest[:NUM_LARGEST_SHOWN]
        ),
        kinds=(MEASURED,),
        basis=f"{view.traced_basis}, at {format_seconds(peak.time_s)}, {place_name(peak.position)}",
        num_text=4,
    )


def root_or_none(storage: Storage) -> str:
    """Of a storage that names no module, as the treemap has it: it is of the root's own forward, or of none."""
    return unit_name("") if storage.phase == "forward" else _NO_MODULE


def _maker(storage: Storage) -> str:
    """`mm, forward`; of what was there when the step began, that it was."""
    operator = storage.operator.replace("aten::", "")
    phase = "before the step" if storage.phase == "baseline" else storage.phase
    return f"{operator}, {phase}" if operator else phase
