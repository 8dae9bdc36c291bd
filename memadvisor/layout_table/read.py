"""A CSV file of layouts -> one LayoutRow for each of its rows, in their order. Columns: docs/layout-table.md."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memadvisor.architecture import Architecture
from memadvisor.architectures.load import named_architecture
from memadvisor.architectures.vision_transformers import image_tokens
from memadvisor.errors import MemadvisorError, UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import TrainingStep
from memadvisor.layout_table.cells import Cells, cells
from memadvisor.layout_table.headers import headings
from memadvisor.layout_table.machine import cluster_of
from memadvisor.layout_table.model import architecture_of
from memadvisor.layout_table.separated import separated_rows
from memadvisor.layout_table.spread import degrees_of, step_of
from memadvisor.layout_table.words import spelled_out
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
        text = read_input(Path(path))
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
    rows = iter(lines)
    header = next((row for row in rows if any(row)), [])
    found, unread = headings(header)
    if not found:
        raise UsageError(
            f"{source!r} has no header with a column of layouts: {_first_row(header)}.",
            hint="name the columns there, as in model,gpus,tp,pp,micro_batch_size; docs/layout-table.md lists them.",
        )
    read = [_row(number, cells(found, row)) for number, row in enumerate(rows, start=2) if row]
    return LayoutTable(rows=read, unread=tuple(unread))


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
    row = _of_one_length(spelled_out(row))
    degrees = degrees_of(row)
    seq_len = row.whole("seq_len")
    if seq_len is None:
        seq_len = _usual_length(row)
        row.note(f"no seq_len: {seq_len} is taken")
    architecture = architecture_of(row, seq_len=seq_len, tensor=degrees.tensor)
    cluster = cluster_of(row, degrees.num_ranks)
    step, is_open = step_of(row, degrees, architecture, seq_len, cluster)
    return LayoutCase(architecture=architecture, step=step, cluster=cluster, micro_batch_is_open=is_open)


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
    """An image's tokens, of a vision transformer by name."""
    known = named_architecture(row.text("model") or "")
    return (image_tokens(known) if known is not None else None) or 2048
