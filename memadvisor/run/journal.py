"""One process's append-only journal: rows in, frames out, and back again.

Writing never raises into the training: the first I/O error closes the journal for good and is kept
in `JournalWriter.failure`. Nothing waits for another process, nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from memadvisor.run.frames import (
    JSON_FRAME,
    MISSING_INT,
    STRINGS_FRAME,
    TABLE_FRAME,
    pack_column,
    pack_frame,
    read_frames,
    unpack_column,
)
from memadvisor.run.records import TABLES

_ROWS_PER_FRAME = 10_000


def _column_kind(annotation: Any) -> str:
    """`text`, `fraction`, `flag` or `whole`: how a field of a row is stored."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not types.NoneType)
    return {str: "text", float: "fraction", bool: "flag"}.get(annotation, "whole")


def table_columns(row_type: type) -> list[tuple[str, str]]:
    """Name and kind of each column of a table, in the order of the row's fields."""
    hints = typing.get_type_hints(row_type)
    return [(field.name, _column_kind(hints[field.name])) for field in dataclasses.fields(row_type)]


class JournalWriter:
    """Appends rows and documents to one file, which belongs to the process that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: OSError | None = None
        self.num_bytes = 0
        self._pid = os.getpid()
        self._fd: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._strings: dict[str, int] = {}
        self._new_strings: list[str] = []
        self._columns = {name: table_columns(row_type) for name, row_type in TABLES.items()}
        self._schemas = {name: number for number, name in enumerate(TABLES, start=1)}
        schemas = [{"schema": self._schemas[n], "table": n, "columns": self._columns[n]} for n in TABLES]
        self.write_document("schemas", schemas)

    def write_document(self, name: str, value: Any) -> None:
        """Append one JSON document: who wrote the journal, a note, the ending."""
        self._append(pack_frame(JSON_FRAME, 0, 1, json.dumps({name: value}).encode()))

    def write_rows(self, table: str, rows: Sequence[Any]) -> None:
        """Append rows of one table, in frames of at most 10,000."""
        for first in range(0, len(rows), _ROWS_PER_FRAME):
            block = rows[first : first + _ROWS_PER_FRAME]
            columns = [self._pack(block, name, kind) for name, kind in self._columns[table]]
            data = b""
            if self._new_strings:
                text = json.dumps(self._new_strings).encode()
                data = pack_frame(STRINGS_FRAME, 0, len(self._new_strings), text)
                self._new_strings = []
            self._append(data + pack_frame(TABLE_FRAME, self._schemas[table], len(block), b"".join(columns)))

    def close(self) -> None:
        if self._fd is not None and self._pid == os.getpid():
            os.close(self._fd)
        self._fd = None

    def _pack(self, rows: Sequence[Any], name: str, kind: str) -> bytes:
        values = [getattr(row, name) for row in rows]
        if kind == "fraction":
            return pack_column([float("nan") if v is None else v for v in values], fraction=True)
        if kind == "text":
            values = [self._intern(v) for v in values]
        return pack_column([MISSING_INT if v is None else int(v) for v in values], fraction=False)

    def _intern(self, text: str | None) -> int | None:
        if text is None:
            return None
        number = self._strings.get(text)
        if number is None:
            number = self._strings[text] = len(self._strings)
            self._new_strings.append(text)
        return number

    def _append(self, data: bytes) -> None:
        # A forked child inherits the descriptor; only the process that opened it may write.
        if self._fd is None or self._pid != os.getpid():
            return
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
            self.num_bytes += len(data)
        except OSError as error:
            self.failure = error
            self.close()


@dataclasses.dataclass(slots=True)
class JournalContents:
    """All that could be read: `rows` by table, `documents` in order, `problems` in words."""

    rows: dict[str, list[Any]]
    documents: list[tuple[str, Any]]
    problems: list[str]
    num_bytes: int


def read_journal(path: Path) -> JournalContents:
    """Read every whole frame of a journal; damage becomes a line in `problems`, never an exception.

    Raises OSError when the file itself cannot be read.
    """
    data = path.read_bytes()
    contents = JournalContents({name: [] for name in TABLES}, [], [], len(data))
    strings: list[str] = []
    schemas: dict[int, tuple[str, list[tuple[str, str]]]] = {}
    for frame in read_frames(data):
        if isinstance(frame, str):
            contents.problems.append(f"{path.name}: {frame}")
            continue
        try:
            if frame.kind == JSON_FRAME:
                for name, value in json.loads(frame.payload).items():
                    if name == "schemas":
                        schemas.update(
                            {s["schema"]: (s["table"], [tuple(c) for c in s["columns"]]) for s in value}
                        )
                    else:
                        contents.documents.append((name, value))
            elif frame.kind == STRINGS_FRAME:
                strings += json.loads(frame.payload)
            elif frame.kind == TABLE_FRAME and frame.schema in schemas:
                table, columns = schemas[frame.schema]
                if table in TABLES:
                    contents.rows[table] += _unpack_rows(
                        TABLES[table], columns, frame.num_rows, frame.payload, strings
                    )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            contents.problems.append(
                f"{path.name}: a frame makes no sense ({type(error).__name__}); it is left out"
            )
    return contents


def _unpack_rows(
    row_type: type, columns: list[tuple[str, str]], num_rows: int, payload: bytes, strings: list[str]
) -> list[Any]:
    width = 8 * num_rows
    if len(payload) != width * len(columns):
        raise ValueError("the payload does not match the schema")
    found: dict[str, list[Any]] = {}
    for position, (name, kind) in enumerate(columns):
        data = payload[position * width : (position + 1) * width]
        values = unpack_column(data, num_rows, fraction=kind == "fraction")
        found[name] = [_CONVERT[kind](value, strings) for value in values]
    # A column that this version does not know is left out; one that it misses is None.
    ordered = [found.get(field.name, [None] * num_rows) for field in dataclasses.fields(row_type)]
    return [row_type(*row) for row in zip(*ordered, strict=True)]


_CONVERT: dict[str, Callable[[Any, list[str]], Any]] = {
    "fraction": lambda value, _: value,
    "whole": lambda value, _: value,
    "flag": lambda value, _: None if value is None else bool(value),
    "text": lambda value, strings: (
        None if value is None else strings[value] if value >= 0 else strings[len(strings)]
    ),
}
