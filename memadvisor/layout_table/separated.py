"""The text of a table -> its rows as lists of cells: CSV with commas, semicolons or tabs, or a table of Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

_RULE = re.compile(r"[\s|:+-]+")  # |---|:--:|


def separated_rows(text: str) -> Iterator[list[str]]:
    """Raises csv.Error where a line is none of CSV."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    if first.lstrip().startswith("|"):
        return _of_markdown(text)
    return csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(first))


def _delimiter(header: str) -> str:
    if "\t" in header:
        return "\t"
    return ";" if header.count(";") > header.count(",") else ","


def _of_markdown(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and not _RULE.fullmatch(stripped):
            cells = re.split(r"(?<!\\)\|", stripped.removeprefix("|").removesuffix("|"))
            yield [cell.replace("\\|", "|").strip() for cell in cells]
