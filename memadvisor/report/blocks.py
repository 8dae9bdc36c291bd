"""What a page is made of: figures, tables, and places where something was not recorded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memadvisor.report.escape import html_text, prose
from memadvisor.run.records import UNEXPLAINED

# Where a figure's numbers come from; shown beside every one of them.
# Beside these a device's own: "datasheet", "given" (hardware.py).
MEASURED, PREDICTED, THEORY = "measured", "predicted", "theory"

# Before the first cell of a table's row that is a part of a row above it.
INNER = "\u2003"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A Plotly figure. Strings like `var(--activation)` under a key that ends in "color" or "colors" are
    read from the page's style when it is drawn, so that a figure follows light and dark."""

    name: str
    title: str
    kinds: tuple[str, ...]
    basis: str  # what it is measured on: "traced step 3", "median of 5 steady steps"
    label: str  # one sentence with the figure's finding, for those who cannot see it
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height_px: int
    note: str = ""  # below the figure; plain text
    legend: Sequence[tuple[str, str]] = ()  # (name, color variable), where Plotly draws none of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A figure's place when there is nothing to draw, with the reason: a gap in the record, or (with
    another `absence`) a finding, such as a run of one rank, which no communication can have."""

    name: str
    title: str
    why: str
    absence: str = "Not recorded."


@dataclass(frozen=True, slots=True)
class Html:
    """Finished HTML: every text in it has gone through `html_text`."""

    text: str


Block = Figure | Missing | Html


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, a sentence on what it answers, and blocks: for all ranks (`shared`), then by rank."""

    name: str
    title: str
    lead: str
    shared: Sequence[Block] = ()
    by_rank: Mapping[int, Sequence[Block]] = field(default_factory=dict)


def kinds_html(kinds: Iterable[str], basis: str = "") -> str:
    """Labels such as "measured", and what the numbers stand on."""
    labels = "".join(f'<span class="kind kind-{kind}">{kind}</span>' for kind in kinds)
    return labels + (f'<span class="basis">{prose(basis)}</span>' if basis else "")


_MOST_ON_A_LINE = 24  # characters of a cell; longer ones are words, not figures, and may be broken

_MOST_IN_A_NAME = 18  # characters; the first column may be about as narrow (style.py)

# Where a long name of a module is broken first; `html_text` writes neither inside an entity.
_BREAK_AFTER = re.compile(r"[._]")


def table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    kinds: Sequence[str],
    basis: str = "",
    num_text: int = 1,
    strong_last: bool = False,
    note: str = "",
) -> Html:
    """A table of plain texts; all columns but the first `num_text` hold figures and align right."""
    lines = [_row([*cells], "td", num_text) for cells in rows]
    if strong_last and lines:
        lines[-1] = lines[-1].replace("<tr>", '<tr class="total">', 1)
    note_html = f'<p class="note">{prose(note)}</p>' if note else ""
    return Html(
        f'<figure class="table"><figcaption><h3>{html_text(title)}</h3>{kinds_html(kinds, basis)}</figcaption>'
        f'<div class="scroll"><table><thead>{_row(heads, "th", num_text)}</thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{note_html}</figure>"
    )


def _row(cells: Sequence[str], tag: str, num_text: int) -> str:
    texts = []
    for position, cell in enumerate(cells):
        kinds = ["number"] * (position >= num_text) + ["words"] * (len(cell) > _MOST_ON_A_LINE)
        if cell.startswith(INNER):
            # As a class: a line may break after a space of any width, and the name would stand beneath its own row.
            kinds, cell = [*kinds, "inner"], cell.removeprefix(INNER)
        css_class = f' class="{" ".join(kinds)}"' if kinds else ""
        text = html_text(cell)
        if position == 0 and len(cell) > _MOST_IN_A_NAME:
            text = _BREAK_AFTER.sub(r"\g<0><wbr>", text)
        texts.append(f"<{tag}{css_class}>{text}</{tag}>")
    return f"<tr>{''.join(texts)}</tr>"


def legend_html(names: Iterable[tuple[str, str]]) -> str:
    """Squares of color, each with its name."""
    items = "".join(
        f'<li><i style="background:{html_text(color)}"></i>{html_text(name)}</li>' for name, color in names
    )
    return f'<ul class="legend">{items}</ul>' if items else ""


def split_bar(parts: Iterable[tuple[str, float, str, str]]) -> str:
    """A bar divided among (name, value, color variable, value in words), and its legend.

    What is nothing is left out, but for the unexplained: that it is nothing is worth saying.
    """
    shown = [part for part in parts if part[1] or part[0] == UNEXPLAINED]
    total = sum(max(0.0, value) for _, value, _, _ in shown)
    if total <= 0:
        return ""
    pieces = "".join(
        f'<span style="width:{100 * value / total:.3f}%;background:var(--{color})" '
        f'title="{html_text(f"{name}: {words}")}"></span>'
        for name, value, color, words in shown
        if value > 0
    )
    legend = "".join(
        f'<li><i style="background:var(--{color})"></i>{html_text(name)} <b>{html_text(words)}</b></li>'
        for name, _, color, words in shown
    )
    return f'<div class="bar" aria-hidden="true">{pieces}</div><ul class="legend">{legend}</ul>'


def paragraph(text: str, css_class: str = "note") -> Html:
    return Html(f'<p class="{css_class}">{prose(text)}</p>')
