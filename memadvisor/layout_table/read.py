"""A CSV file of layouts -> one LayoutRow for each of its rows, in their order. Columns: docs/layout-table.md."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from memadvisor.architecture import Architecture
from memadvisor.architectures.load import named_architecture
from memadvisor.architectures.vision_transformers import image_tokens
from memadvisor.errors import MemadvisorError, UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import TrainingStep
from memadvisor.layout_table.cells import Cells, cells
from memadvisor.layout_table.degrees import degrees_of
from memadvisor.layout_table.headers import Heading, headings
from memadvisor.layout_table.machine import cluster_of
from memadvisor.layout_table.model import architecture_of, billions_in
from memadvisor.layout_table.separated import separated_rows
from memadvisor.layout_table.spread import step_of
from memadvisor.layout_table.words import is_of_replica, spelled_out
from memadvisor.run.files import read_input


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCase:
    """What one row describes. `micro_batch_is_open`: the table does not say the micro-batch size, which is 1 in `step`."""

    architecture: Architecture
    step: TrainingStep
    cluster: Cluster
    micro_batch_is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow:
    """One row of the table: its case, or the error that says why it has none; and what was assumed or set right."""

    line: int
    case: LayoutCase | None
    error: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """`unread`: names of the header that are no column of layouts, as they stand."""

    rows: list[LayoutRow]
    unread: tuple[str, ...]


def read_layout_table(path: str | Path) -> LayoutTable:
    """All rows of a file. Raises UsageError where the file is no table of layouts; a row that is not one has its error."""
    try:
        text = read_input(Path(path), of_spreadsheet=True)
        return read_table(separated_rows(text), str(path))
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be read: {error.strerror}.", hint="name a CSV file of layouts."
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{str(path)!r} is not a CSV file: {error}.", hint="docs/layout-table.md describes it."
        ) from error


def read_table(lines: Iterable[list[str]], source: str) -> LayoutTable:
    """As read_layout_table, of rows that are split already. The first is the header."""
    rows = _upright(list(lines))
    place = _header_place(rows)
    header = rows[place] if rows else []
    found, unread = headings(header)
    if not found:
        raise UsageError(
            f"{source!r} has no header with a column of layouts: {_first_row(header)}.",
            hint="name the columns there, as in model,gpus,tp,pp,micro_batch_size; docs/layout-table.md lists them.",
        )
    told = _of_each_replica(_told(found, rows[place + 1 :], place + 2, _titled(rows[:place])))
    return LayoutTable(rows=[_row(number, row) for number, row in told], unread=tuple(unread))


def _upright(rows: list[list[str]]) -> list[list[str]]:
    """With layouts in rows: some publish them in columns, under names in the first."""
    written = [row for row in rows if any(cell.strip() for cell in row)]
    names = [row[0] for row in written]
    across = max((len(headings(row)[0]) for row in rows[:_TITLES]), default=0)
    down = len(headings(names)[0]) if len(names) > 2 else 0
    if across > 1 or down < 3:
        return rows
    width = max(len(row) for row in written)
    filled = [row + [""] * (width - len(row)) for row in written]
    models = any(each.columns == ("model",) for each in headings(names[1:])[0])
    if models and headings(names[:1])[0] and not headings(filled[0][1:])[0]:  # `Parameter, Run A, Run B`
        filled[0] = ["run", *filled[0][1:]]
    elif not headings(names[:1])[0]:  # what stands above the columns is their model, as far as it is one
        filled[0] = ["model" if not models else "run", *filled[0][1:]]
    return [list(column) for column in zip(*filled, strict=True)]


_TITLES = 12  # lines above a header, at most


def _header_place(rows: list[list[str]]) -> int:
    """Of the first row with two columns' names, titles and captions above it left out; else of the first that says something."""
    for place, row in enumerate(rows[:_TITLES]):
        known = len(headings(row)[0])
        if known > 1:  # names of groups of columns may stand above theirs
            below = rows[place + 1] if place + 1 < len(rows) and "" in (cell.strip() for cell in row) else []
            return place + (len(headings(below)[0]) > known)
    return next((place for place, row in enumerate(rows) if any(row)), 0)


def _titled(rows: list[list[str]]) -> str | None:
    """The model that a caption above the header names."""
    named = (cell for row in rows for cell in row if named_architecture(cell.strip()) is not None)
    return next(named, None)


def _told(
    found: list[Heading], rows: list[list[str]], first: int, title: str | None
) -> Iterator[tuple[int, Cells]]:
    """The cells of each row with its line. Where a spreadsheet has merged a model's cell with those above, all that is
    empty before the row's first cell is as there; a row with a model alone before such rows is their caption."""
    place = next((each.position for each in found if each.columns == ("model",)), None)
    above: list[str] = []
    for number, row in enumerate(rows, start=first):
        if not row:
            continue
        empty = next((at for at, cell in enumerate(row) if cell.strip()), len(row))
        is_merged = place is not None and place < empty < len(row) and place < len(above)
        if is_merged:
            row = above[:empty] + row[empty:]
        read = cells(found, row)
        if is_merged and read.text("model"):
            read.note(f"the cells above are taken for the row's first {empty}")
        if title is not None and place is None:
            read = Cells({"model": title, **read.texts}, read.notes)
        is_bare = set(read.texts) == {"model"} and len(found) > 1
        below = rows[number - first + 1] if number - first + 1 < len(rows) else []
        if is_bare and place is not None and place < len(below) and not below[place].strip() and any(below):
            read = Cells({"caption": read.texts["model"]}, read.notes)
        above = row
        yield number, read


def _of_each_replica(rows: Iterable[tuple[int, Cells]]) -> list[tuple[int, Cells]]:
    """Where a bare batch size of one row cannot be the step's, it is a replica's in all rows."""
    found = list(rows)
    if not any(is_of_replica(row) for _, row in found):
        return found
    return [(number, _with_own_batch(row)) for number, row in found]


def _with_own_batch(row: Cells) -> Cells:
    others = {"micro_batch_size", "global_batch_seqs", "global_batch_tokens"} & set(row.texts)
    if others or "batch_size" not in row.texts:
        return row
    row.note("batch_size is taken for a replica's microbatch")
    texts = {**row.texts, "micro_batch_size": row.texts["batch_size"]}
    del texts["batch_size"]
    return Cells(texts, row.notes)


def _first_row(row: list[str]) -> str:
    text = ",".join(row)
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    return f"its first row is {shown!r}" if row else "it is empty"


def read_rows(lines: Iterable[list[str]], source: str) -> list[LayoutRow]:
    """The rows of a table alone."""
    return read_table(lines, source).rows


def _row(line: int, row: Cells) -> LayoutRow:
    try:
        case = _case(row)
    except MemadvisorError as error:
        return LayoutRow(line=line, case=None, error=error.one_line(), notes=tuple(row.notes))
    return LayoutRow(line=line, case=case, notes=tuple(row.notes))


def _case(row: Cells) -> LayoutCase:
    if row.text("caption") is not None:
        raise UsageError("no layout, but the model of the rows below it.")
    row = _of_one_length(_without_aside(spelled_out(row)))
    degrees = degrees_of(row)
    seq_len = row.whole("seq_len")
    if seq_len is None:
        seq_len = _usual_length(row)
        row.note(f"no seq_len: {seq_len} is taken")
    architecture = architecture_of(row, seq_len=seq_len, tensor=degrees.tensor)
    cluster = cluster_of(row, degrees.num_ranks)
    step, is_open = step_of(row, degrees, architecture, seq_len, cluster)
    return LayoutCase(architecture=architecture, step=step, cluster=cluster, micro_batch_is_open=is_open)


def _without_aside(row: Cells) -> Cells:
    """The model without brackets behind its name, where only that is known (`DeepSeek V3 (671B)`), and of the size in them."""
    name = row.text("model") or ""
    aside = re.fullmatch(r"(.*\w)\s*\(([^()]*)\)", name)
    if aside is None or named_architecture(name) is not None:
        return row
    known = named_architecture(aside[1])
    size = billions_in(aside[2])
    if known is None or (size is not None and not 0.75 < size * 1e9 / known.num_parameters() < 1.33):
        return row
    return Cells({**row.texts, "model": aside[1]}, row.notes)


def _of_one_length(row: Cells) -> Cells:
    """A target's length alone is the sequence's, of a model without an encoder (MaxText's `max_target_length`)."""
    known = named_architecture(row.text("model") or "")
    has_encoder = known is not None and known.encoder_layers > 0
    if "target_len" not in row.texts or "seq_len" in row.texts or row.count("encoder_layers") or has_encoder:
        return row
    texts = dict(row.texts)
    texts["seq_len"] = texts.pop("target_len")
    return Cells(texts, row.notes)


def _usual_length(row: Cells) -> int:
    """An image's tokens, of a vision transformer by name; no more than the model has positions."""
    known = named_architecture(row.text("model") or "")
    if known is None:
        return 2048
    return image_tokens(known) or min(2048, known.positions or 2048)
