"""One process's append-only journal: rows in, frames out, and back again.

Writing never raises into the training: the first I/O error closes the journal for good and is kept
in `JournalWriter.failure`. Nothing waits for another process, nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from memadvisor.run.frames import (
    JSON_FRAME,
    MISSING_INT,
    STRINGS_FRAME,
    TABLE_FRAME,
    Frame,
    pack_column,
    pack_frame,
    read_frames,
    unpack_column,
)
from memadvisor.run.records import TABLES

_ROWS_PER_FRAME = 10_000
_CHARACTERS_PER_FRAME = 1_000_000  # of interned strings; a character takes at most 12 bytes of JSON
_LONGEST_STRING = 10_000

# Without these documents the rest cannot be read, so each stands twice: damage to one loses nothing.
_VITAL = ("schemas", "process")
_MOST_PROBLEMS = 100


def _column_kind(annotation: Any) -> str:
    """`text`, `fraction`, `flag` or `whole`: how a field of a row is stored."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not types.NoneType)
    return {str: "text", float: "fraction", bool: "flag"}.get(annotation, "whole")


@cache  # hints are text that Python compiles each time, and every frame of a journal asks
def table_columns(row_type: type) -> tuple[tuple[str, str], ...]:
    """Name and kind of each column of a table, in the order of the row's fields."""
    hints = typing.get_type_hints(row_type)
    return tuple((field.name, _column_kind(hints[field.name])) for field in dataclasses.fields(row_type))


@cache
def _required_columns(row_type: type) -> tuple[bool, ...]:
    """Of each column, whether every row must have a value."""
    hints = typing.get_type_hints(row_type)
    return tuple(not isinstance(hints[field.name], types.UnionType) for field in dataclasses.fields(row_type))


def _blocks(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (rows[first : first + _ROWS_PER_FRAME] for first in range(0, len(rows), _ROWS_PER_FRAME))


class JournalWriter:
    """Appends rows and documents to one file, which belongs to the process that opened it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: OSError | None = None
        self.num_bytes = 0
        self.num_raw_bytes = 0  # before compression, which is what a reader limits
        self._pid = os.getpid()
        self._fd: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        status = os.fstat(self._fd)
        self._identity = (status.st_dev, status.st_ino)
        self._journal_id = int.from_bytes(os.urandom(4), "little")
        self._num_frames = 0
        self._strings: dict[str, int] = {}
        self._new_strings: list[str] = []
        self._columns = {name: table_columns(row_type) for name, row_type in TABLES.items()}
        self._schemas = {name: number for number, name in enumerate(TABLES, start=1)}
        schemas = [{"schema": self._schemas[n], "table": n, "columns": self._columns[n]} for n in TABLES]
        self.write_document("schemas", schemas)

    def write_document(self, name: str, value: Any) -> None:
        """Append one JSON document: who wrote the journal, a note, the ending."""
        payload = json.dumps({name: value}).encode()
        for _ in range(2 if name in _VITAL else 1):
            self._append(self._frame(JSON_FRAME, 0, 1, payload))

    def write_rows(self, table: str, rows: Sequence[Any]) -> None:
        """Append rows of one table, in frames of at most 10,000."""
        for block in _blocks(rows):
            columns = (map(attrgetter(name), block) for name, _ in self._columns[table])
            self._write_columns(table, columns, len(block))

    def write_tuples(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        """`write_rows` of what many steps have several of: the values of each row's fields, in their order."""
        for block in _blocks(rows):
            self._write_columns(table, zip(*block, strict=True), len(block))

    def _write_columns(self, table: str, columns: Iterable[Iterable[Any]], num_rows: int) -> None:
        kinds = (kind for _, kind in self._columns[table])
        packed = [self._pack(list(values), kind) for values, kind in zip(columns, kinds, strict=True)]
        frames = [*self._string_frames()]
        frames.append(self._frame(TABLE_FRAME, self._schemas[table], num_rows, b"".join(packed)))
        self._append(b"".join(frames))

    def close(self) -> None:
        if self._fd is not None and self._pid == os.getpid() and self._is_ours(self._fd):
            os.close(self._fd)
        self._fd = None

    def _is_ours(self, descriptor: int) -> bool:
        # A script may close every descriptor it does not know (daemons do), and open a file of its own
        # under our number: never write into that one, nor close it.
        try:
            status = os.fstat(descriptor)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def _frame(self, kind: int, schema: int, num_rows: int, payload: bytes) -> bytes:
        number = self._num_frames
        self._num_frames += 1
        self.num_raw_bytes += len(payload)
        return pack_frame(kind, schema, num_rows, payload, journal=self._journal_id, number=number)

    def _string_frames(self) -> Iterator[bytes]:
        """Every string that rows to come refer to and no frame has named yet, with the number of the first."""
        strings, self._new_strings = self._new_strings, []
        first = len(self._strings) - len(strings)
        while strings:
            num_characters, count = 0, 0
            while count < len(strings) and num_characters < _CHARACTERS_PER_FRAME:
                num_characters += len(strings[count])
                count += 1
            text = json.dumps({"first": first, "strings": strings[:count]}).encode()
            yield self._frame(STRINGS_FRAME, 0, count, text)
            first, strings = first + count, strings[count:]

    def _pack(self, values: list[Any], kind: str) -> bytes:
        if kind == "fraction":
            return pack_column(values, fraction=True)
        if kind == "text":
            values = [self._intern(v) for v in values]
        if None in values:
            values = [MISSING_INT if v is None else v for v in values]
        return pack_column(values, fraction=False)

    def _intern(self, text: str | None) -> int | None:
        if text is None:
            return None
        if len(text) > _LONGEST_STRING:
            text = text[: _LONGEST_STRING - 3] + "..."
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
            if not self._is_ours(self._fd):
                raise OSError(errno.EBADF, "the script has closed the journal")
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


@dataclasses.dataclass(slots=True)
class _Vocabulary:
    """What frames of one journal need of earlier ones of the same: schemas, strings by number."""

    last_number: int = -1
    strings: dict[int, str] = dataclasses.field(default_factory=dict)
    schemas: dict[int, tuple[str, list[tuple[str, str]]]] = dataclasses.field(default_factory=dict)


def read_journal(path: Path) -> JournalContents:
    """Read every whole frame of a journal; damage becomes a line in `problems`, never an exception.

    Raises OSError when the file itself cannot be read.
    """
    data = path.read_bytes()
    contents = JournalContents({name: [] for name in TABLES}, [], [], len(data))
    vocabularies: dict[int, _Vocabulary] = {}
    for frame in read_frames(data):
        problem = frame if isinstance(frame, str) else _read_frame(frame, vocabularies, contents)
        if problem is not None:
            _add_problem(contents.problems, f"{path.name}: {problem}")
    return contents


def _add_problem(problems: list[str], text: str) -> None:
    # A file of nothing but damage must not become a list of a million lines.
    if len(problems) < _MOST_PROBLEMS:
        problems.append(text)
    elif len(problems) == _MOST_PROBLEMS:
        problems.append("there is more damage than is listed here")


def _read_frame(frame: Frame, vocabularies: dict[int, _Vocabulary], contents: JournalContents) -> str | None:
    """Take one frame into `contents`; returns what is wrong with it, in words."""
    vocabulary = vocabularies.setdefault(frame.journal, _Vocabulary())
    if frame.number <= vocabulary.last_number:
        return f"frame {frame.number} stands twice, or out of its place; it is left out"
    missing = frame.number - vocabulary.last_number - 1
    vocabulary.last_number = frame.number
    lost = f"{missing} frame{'s are' if missing > 1 else ' is'} missing before frame {frame.number}"
    try:
        damage = _take(frame, vocabulary, contents)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        damage = f"frame {frame.number} makes no sense ({type(error).__name__}); it is left out"
    return "; ".join(text for text in (lost if missing else None, damage) if text) or None


def _take(frame: Frame, vocabulary: _Vocabulary, contents: JournalContents) -> str | None:
    if frame.kind == 0:
        return f"frame {frame.number} has a later format than this version reads; it is left out"
    if frame.kind == JSON_FRAME:
        for name, value in json.loads(frame.payload).items():
            if name == "schemas":
                for schema in value:
                    columns = [(str(column), str(kind)) for column, kind in schema["columns"]]
                    vocabulary.schemas[int(schema["schema"])] = (str(schema["table"]), columns)
            else:
                contents.documents.append((name, value))
    elif frame.kind == STRINGS_FRAME:
        value = json.loads(frame.payload)
        strings = value["strings"]
        if not all(isinstance(text, str) for text in strings):
            raise TypeError("a string is none")
        vocabulary.strings.update(enumerate(strings, start=int(value["first"])))
    elif frame.kind == TABLE_FRAME:
        if frame.schema not in vocabulary.schemas:
            return f"frame {frame.number} has an unknown schema; it is left out"
        table, columns = vocabulary.schemas[frame.schema]
        if table in TABLES:  # else a table of a later version
            rows = _unpack_rows(TABLES[table], columns, frame.num_rows, frame.payload, vocabulary.strings)
            contents.rows[table] += rows
            if len(rows) < frame.num_rows:
                return f"{frame.num_rows - len(rows)} rows of {table} lack a value that damage has taken; they are left out"
    return None


def _unpack_rows(
    row_type: type,
    columns: list[tuple[str, str]],
    num_rows: int,
    payload: bytes,
    strings: Mapping[int, str],
) -> list[Any]:
    """The rows of a table frame, without those that lack a value which every row must have.

    A column that this version does not know is left out; one that the frame lacks has its default, or is None.
    """
    width = 8 * num_rows
    if not columns or len(payload) != width * len(columns):
        raise ValueError("the payload does not match the schema")
    known = dict(table_columns(row_type))
    found: dict[str, list[Any]] = {}
    lost: set[int] = set()
    for position, (name, kind) in enumerate(columns):
        if name not in known:
            continue
        if known[name] != kind:
            raise ValueError("a column is of another kind than its values")
        data = payload[position * width : (position + 1) * width]
        values = unpack_column(data, num_rows, fraction=kind == "fraction")
        found[name] = _convert(values, kind, strings)
        if found[name].count(None) > values.count(None):  # a string that damage has taken
            lost |= {
                row for row, value in enumerate(values) if value is not None and found[name][row] is None
            }
    usual = {each.name: each.default for each in dataclasses.fields(row_type)}
    for name in known:
        default = usual[name]
        found.setdefault(name, [None if default is dataclasses.MISSING else default] * num_rows)
    ordered = [found[name] for name in known]
    lost |= _incomplete_rows(row_type, ordered)
    rows = zip(*ordered, strict=True)
    return [row_type(*values) for row, values in enumerate(rows) if row not in lost]


def _convert(values: list[Any], kind: str, strings: Mapping[int, str]) -> list[Any]:
    if kind == "text":
        return [None if value is None else strings.get(value) for value in values]
    if kind == "flag":
        return [None if value is None else bool(value) for value in values]
    return values


def _incomplete_rows(row_type: type, columns: Sequence[list[Any]]) -> set[int]:
    """Positions of the rows that have None where the row's type allows none."""
    return {
        row
        for values, is_required in zip(columns, _required_columns(row_type), strict=True)
        if is_required and None in values
        for row, value in enumerate(values)
        if value is None
    }
