"""One row's cells by column, and what they say: whole numbers, numbers, yes or no. An empty cell is no cell."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from memadvisor.errors import UsageError
from memadvisor.layout_table.columns import plain
from memadvisor.layout_table.headers import Heading, parted

# Beyond these a number is a slip of the pen, and would cost more memory and time than the whole table.
_LARGEST = {
    "n_layers": 10_000,
    "pp": 100_000,
    "chunks": 10_000,
    "grad_accum": 10**7,
    "global_batch_seqs": 10**9,
    "hidden": 10**7,
    "ffn": 10**8,
}
# 8k tokens of a sequence are 8192; 4M tokens of a batch, and 7B parameters, are decimal.
_BINARY = ("seq_len",)
# Columns that several of a table may be names for, whose words go together or say the same in other words.
_OF_WORDS = (
    "parallelism",
    "source",
    "model",
    "interconnect",
    "strategy",
    "attention",
    "gpu",
    "n_params",
    "params_b",
)
_NUMBER = re.compile(
    r"[~\u2248]?\s*([+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*((?i:million|billion|trillion)|[kmbtKMBT]?)"
    r"(?:\s*(?:[gG]i?[bB](?:/s)?|[gG]|W|tokens?|toks?|params?|parameters|[gG][pP][uU]s?|layers?|seqs?|sequences?|samples?|nodes?|cards?|stages?))?",
    re.ASCII,
)
# `**8**`, `8*`, `8 [2]`: emphasis, and marks of footnotes.
_MARKS = re.compile(
    r"^[*`]+|\s*(?:[*`\u2020\u2021\u00a7\u00b9\u00b2\u00b3\u2070-\u2079]+|\[\^?\d+\]|<sup>.*?</sup>|\([a-z]\))+$"
)
# `4.096` and `1 536` sequences: thousands, as no part of one is counted.
_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:[.' ]\d{3})+")
_POWER = re.compile(r"(\d{1,2})\s*(?:\^|\*\*)\s*(\d{1,2})", re.ASCII)  # 2^14
# `TP8`, `pp=4`, `8-way`: a degree with its own name.
_DEGREE = re.compile(r"(?:([tpdce]p)\s*[-_=:]?\s*)?(\d+)(?:\s*-?\s*ways?)?", re.IGNORECASE | re.ASCII)
_ASIDE = re.compile(r"\s*\([^()]*\)$")  # `1 (OOM at 2)`
_EMPTY = (
    "", "-", "--", "---", "\u2013", "\u2014", "na", "n/a", "n.a.", "nan", "null", "?", "unknown", "tbd", "auto", "/", "\\",
    "not given", "not reported", "not specified", "unspecified", "n/s", "n.s.",
)  # fmt: skip
YES = (
    "true", "yes", "on", "1", "1.0", "y", "t", "enabled", "enable", "w/", "with", "x", "\u662f", "\u5f00", "\u2713", "\u2714", "\u2705", "\u221a",
)  # fmt: skip
_PLACES = (  # where something is offloaded to, or what is: that it is
    "cpu", "host", "nvme", "disk", "ssd", "ram", "optimizer", "optim", "params", "parameters", "100%",
)  # fmt: skip
NO = (
    "false", "no", "off", "0", "0.0", "n", "f", "none", "disabled", "disable", "w/o", "without", "\u65e0", "\u5426", "\u5173", "\u2717", "\u2718", "\u274c",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cells:
    """`texts`: cells that say something, by column. `notes` gathers what was assumed or set right on the way."""

    texts: Mapping[str, str]
    notes: list[str] = field(default_factory=list)

    def text(self, column: str) -> str | None:
        return self.texts.get(column)

    def whole(self, column: str) -> int | None:
        """A positive whole number; `8.0`, `1,024` and `1_024` are some. Raises UsageError for anything else."""
        value = self._value(column)
        if value is None:
            return None
        if _THOUSANDS.fullmatch(self.texts[column]) and value != int(value if math.isfinite(value) else 0):
            value = float(re.sub(r"\D", "", self.texts[column]))
        if not (1 <= value < 2**53 and value == int(value)):
            raise UsageError(f"{column} is {self.texts[column]!r}, which is no positive whole number.")
        if value > _LARGEST.get(column, 2**53):
            raise UsageError(f"{column} is {self.texts[column]!r}, which is beyond all that is trained.")
        return int(value)

    def count(self, column: str) -> int | None:
        """A whole number, which may be 0."""
        return 0 if self.texts.get(column) in ("0", "0.0") else self.whole(column)

    def number(self, column: str) -> float | None:
        """A positive number. Raises UsageError for anything else."""
        value = self._value(column)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{column} is {self.texts[column]!r}, which is no positive number.")
        return value

    def _value(self, column: str) -> float | None:
        """The number that a cell has; nan for words; None for no cell and for `none`."""
        text = self.texts.get(column)
        if text is None or text.lower() == "none":
            return None
        power = _POWER.fullmatch(text)
        if power is not None:
            return float(int(power[1]) ** int(power[2]))
        degree = _DEGREE.fullmatch(text)
        if degree is not None and (degree[1] or column).lower() == column:
            text = degree[2]
        match = _NUMBER.fullmatch(text)
        if match is None and (match := _NUMBER.fullmatch(_ASIDE.sub("", text))) is not None:
            self.note(f"of {column} {text!r} what stands in brackets is not read")
        if match is None or (column == "n_params" and re.search(r"g(i?b)?\s*$", text.lower())):  # bytes
            return math.nan
        digits, suffix = match.groups()
        thousand = 1024.0 if column in _BINARY else 1000.0
        return float(re.sub("[,_]", "", digits)) * thousand ** " kmbt".index(suffix[:1].lower() or " ")

    def flag(self, column: str) -> bool | None:
        """Yes or no. Raises UsageError for anything else."""
        text = self.texts.get(column)
        if text is None:
            return None
        if text.lower() in YES or text.lower() in _PLACES:
            return True
        if text.lower() in NO:
            return False
        raise UsageError(f"{column} is {text!r}, which is neither true nor false.")

    def note(self, text: str) -> None:
        if text not in self.notes:  # a cell may be asked for more than once
            self.notes.append(text)


def cells(headings: Iterable[Heading], row: list[str]) -> Cells:
    """The cells of one row. A row shorter than the header has empty cells at its end."""
    texts: dict[str, str] = {}
    notes: list[str] = []
    for heading in sorted(headings, key=lambda each: (each.order, each.position)):
        text = _said(row[heading.position]) if heading.position < len(row) else None
        if text is None:
            continue
        if len(heading.columns) > 1:
            said = parted(text, heading.columns)
            said = {column: part for column, part in said.items() if part.lower() not in _EMPTY}
        else:
            bare = heading.unit and re.fullmatch(r"[\d.,_]+", text)
            said = {heading.columns[0]: text + heading.unit if bare else text}
        notes += [
            f"{column} is said twice, {texts[column]!r} and {part!r}: the first is read"
            for column, part in said.items()
            if column not in _OF_WORDS and plain(part) != plain(texts.get(column, part))
        ]
        if heading.columns == ("grad_accum",) and "microbatch" in heading.name:
            said["counts_microbatches"] = "true"  # a batch size beside these is of all of them
        if "parallelism" in said and "parallelism" in texts:
            texts["parallelism"] += f", {said['parallelism']}"
        texts = said | texts
    return Cells(texts, notes)


def _said(cell: str) -> str | None:
    """A cell without Markdown's emphasis and a footnote's mark; None where it says nothing."""
    text = _MARKS.sub("", cell.replace("\ufe0f", "").strip())  # of a tick, that it is drawn in colour
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:  # `'True'`
        text = text[1:-1].strip()
    return None if text.lower() in _EMPTY else text
