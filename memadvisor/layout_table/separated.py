"""The text of a table -> its rows as lists of cells: CSV with commas, semicolons or tabs, a table of Markdown or LaTeX,
columns of blanks, or JSON's objects, in a list or a line each."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Iterator

_RULE = re.compile(r"[\s|:+-]+")  # |---|:--:|
# Blanks and hyphens that do not break, and what is not seen.
_AS_TYPED = str.maketrans(
    dict.fromkeys("\u00a0\u2007\u2009\u202f", " ")
    | dict.fromkeys("\u2010\u2011", "-")
    | dict.fromkeys("\u200b\u00ad\ufeff")
)
_ENTITY = re.compile(r"&(?:#\d+|#x[0-9a-f]+|[a-z]+\d*);", re.IGNORECASE)
_TAGS = re.compile(r"</?(?:b|i|u|em|strong|code|p)>", re.IGNORECASE)
_LATEX_ROW = re.compile(r"(?<!\\)&.*\\\\")
_LATEX_WORDS = re.compile(r"\\(?:textbf|textit|emph|multirow\{[^}]*\}\{[^}]*\})\{([^{}]*)\}")


def separated_rows(text: str) -> Iterator[list[str]]:
    """Raises csv.Error where a line is none of CSV."""
    if (objects := _objects(text)) is not None:
        return _of_objects(objects)
    text = _ENTITY.sub(lambda found: html.unescape(found[0]), text).translate(_AS_TYPED)
    text = _TAGS.sub("", re.sub(r"<br\s*/?>", " ", text))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if first.startswith("|") or (len(lines) > 1 and "|" in lines[1] and _RULE.fullmatch(lines[1])):
        return _of_markdown(text)
    if first.startswith("\\") or _LATEX_ROW.search(first):
        return _of_latex(lines)
    if not re.search(r"[,;\t]", first) and (aligned := _of_blanks(lines)):
        return iter(aligned)
    return csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(first))


def _objects(text: str) -> list[dict[str, object]] | None:
    text = text.lstrip("\ufeff").strip()
    if not text.startswith(("[", "{")):
        return None
    for written in (text, f"[{','.join(text.splitlines())}]"):
        try:
            found = json.loads(written)
            break
        except (ValueError, RecursionError):
            continue
    else:
        return None
    found = [found] if isinstance(found, dict) else found
    return found if found and all(isinstance(each, dict) for each in found) else None


def _of_objects(objects: list[dict[str, object]]) -> Iterator[list[str]]:
    names = list(dict.fromkeys(name for each in objects for name in each))
    yield names
    for each in objects:
        values = (each.get(name) for name in names)
        yield ["" if value is None else str(value) for value in values]


def _delimiter(header: str) -> str:
    if "\t" in header:
        return "\t"
    return ";" if header.count(";") > header.count(",") else ","


def _of_markdown(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        stripped = line.strip()
        if stripped and not _RULE.fullmatch(stripped):
            if stripped.startswith("|"):
                stripped = stripped[1:].removesuffix("|")
            cells = re.split(r"(?<!\\)\|", stripped)
            yield [cell.replace("\\|", "|").strip() for cell in cells]


def _of_latex(lines: list[str]) -> Iterator[list[str]]:
    for line in lines:
        if _LATEX_ROW.search(line):
            cells = re.split(r"(?<!\\)&", re.sub(r"\\\\.*$", "", _LATEX_WORDS.sub(r"\1", line)))
            cells = [re.sub(r"\\(?:hline|\w+rule)\b", "", cell) for cell in cells]
            yield [
                re.sub(r"\\([%&_#$])", r"\1", cell).replace("$", "").replace("~", " ").strip()
                for cell in cells
            ]


def _of_blanks(lines: list[str]) -> list[list[str]]:
    """Columns parted by several blanks, or by any, where all lines have as many; none otherwise."""
    for blanks in (r"\s{2,}", r"\s+"):
        rows = [re.split(blanks, line) for line in lines]
        if len(rows) > 1 and len(rows[0]) > 1 and len({len(row) for row in rows}) == 1:
            return rows
    return []
