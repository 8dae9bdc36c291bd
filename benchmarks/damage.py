"""Damaged copies of run directories, and what a reader may make of them.

A case is drawn from a seed, so that one that fails can be made again. Two families:
- damage: bits, pieces and whole files that went wrong. Checksums must find it: a row that is read is a row
  that was written, and a run that says that it is whole is whole.
- crafted: frames whose checksums are right and whose content is absurd. Nothing can tell what is wrong there,
  but nothing may crash or hang either.
"""

from __future__ import annotations

import io
import json
import random
import time
import warnings
from collections import Counter as Multiset
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.cli.show import choose_hardware, print_analysis, print_summary
from memadvisor.errors import MemadvisorError
from memadvisor.run.documents import ProcessInfo
from memadvisor.run.frames import (
    HEADER,
    JSON_FRAME,
    MISSING_INT,
    TABLE_FRAME,
    pack_column,
    pack_frame,
    read_frames,
    unpack_column,
)
from memadvisor.run.journal import read_journal, table_columns
from memadvisor.run.records import TABLES
from memadvisor.run.run import RankRun, Run
from memadvisor.run.store import load_run

Files = dict[str, bytes]
_STARTS = (0, 4, 5, 6, 8, 12, 16, 20, 24, 28)  # of a header's fields
_WHOLE = (0, 1, -1, 2, 7, -5, 10**6, 2**31, 2**53 + 1, 2**62, -(2**62), 2**63 - 1, MISSING_INT)
_FRACTIONS = (0.0, -1.0, 1e-300, 1e300, -1e300, 1.7e308, float("nan"), float("inf"), 1e9, 5e-324)


def read_files(directory: Path) -> Files:
    """The files of a run that a reader looks at, by name."""
    return {
        path.name: path.read_bytes()
        for path in sorted(directory.iterdir())
        if path.suffix in (".json", ".journal")
    }


def write_files(files: Files, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)


# ---- damage ----------------------------------------------------------------------------------------


def _flip_bits(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip_in_header(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    """A field of a frame's header, where a flip does most harm."""
    start = rng.choice(frame_starts(data))
    changed = bytearray(data)
    position = min(len(data) - 1, start + rng.choice(_STARTS) + rng.randrange(4))
    changed[position] = rng.randrange(256)
    return bytes(changed)


def _truncate(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def _cut_out(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    start, length = rng.randrange(len(data)), rng.randrange(1, max(2, len(data) // 4))
    return data[:start] + data[start + length :]


def _splice(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """A piece of this or of another file is put in, over what was there or between."""
    source = rng.choice((data, *others))
    start, length = rng.randrange(len(source)), rng.randrange(1, max(2, len(source) // 3))
    piece, position = source[start : start + length], rng.randrange(len(data))
    return data[:position] + piece + data[position + rng.choice((0, len(piece))) :]


def _shuffle_frames(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    """Whole frames twice, missing, in another order, or from another journal."""
    frames = _split(data)
    foreign = [frame for other in others for frame in _split(other)]
    for _ in range(rng.randrange(1, 6)):
        position = rng.randrange(len(frames) + 1)
        deed = rng.randrange(4)
        if deed == 0 and frames:
            frames.insert(position, rng.choice(frames))
        elif deed == 1 and foreign:
            frames.insert(position, rng.choice(foreign))
        elif deed == 2 and frames:
            frames.pop(min(position, len(frames) - 1))
        elif frames:
            frames.insert(position, frames.pop(rng.randrange(len(frames))))
    return b"".join(frames)


def _garbage(data: bytes, rng: random.Random, _: Sequence[bytes]) -> bytes:
    length = rng.choice((0, 1, 31, 32, 33, 1000, 100_000))
    noise = rng.randbytes(length)
    if rng.random() < 0.3:  # many beginnings of frames, none of which ends
        header = HEADER.pack(b"MADV", 1, 3, 1, 2**31, rng.randrange(2**20), 2**24, 0, 0, 0)
        noise = (header + rng.randbytes(7)) * (length // 40)
    position = rng.randrange(len(data))
    return rng.choice((noise, data + noise, noise + data, data[:position] + noise + data[position:]))


DAMAGES: dict[str, Callable[[bytes, random.Random, Sequence[bytes]], bytes]] = {
    "flipped bits": _flip_bits,
    "changed header": _flip_in_header,
    "truncated": _truncate,
    "cut out": _cut_out,
    "spliced": _splice,
    "frames moved": _shuffle_frames,
    "garbage": _garbage,
}


def _damaged_json(data: bytes, rng: random.Random) -> bytes:
    """manifest.json or plan.json with damage, or with absurd values in place of its own."""
    if rng.random() < 0.5:
        return DAMAGES[rng.choice(("flipped bits", "truncated", "cut out", "garbage"))](data, rng, ())
    value = json.loads(data)
    for _ in range(rng.randrange(1, 3)):
        _change_inside(value, rng)
    return rng.choice((json.dumps(value), "[" * 100_000, json.dumps([value]), "")).encode()


def _change_inside(value: object, rng: random.Random) -> None:
    absurd = (
        None, -1, 0, 1e400, 2**70, -(2**70), "", "x" * 1000, [], {}, [None], True, "\ud800", 1.5, 10**6, 0.0, "-1",
    )  # fmt: skip
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[key]  # type: ignore[call-overload]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            value = inner
            continue
        if isinstance(value, dict) and rng.random() < 0.2:
            del value[key]
        else:
            value[key] = rng.choice(absurd)  # type: ignore[call-overload]
        return


# ---- crafted ---------------------------------------------------------------------------------------


def _craft(data: bytes, rng: random.Random) -> bytes:
    """The journal with absurd values under right checksums: some cells, a table's rows, or a document."""
    frames = [frame for frame in read_frames(data) if not isinstance(frame, str)]
    deeds = [rng.choice((_craft_cells, _craft_cells, _craft_rows, _craft_document)) for _ in range(3)]
    blobs: list[tuple[int, int, int, bytes]] = [(f.kind, f.schema, f.num_rows, f.payload) for f in frames]
    for deed in deeds[: rng.randrange(1, 4)]:
        deed(blobs, rng)
    return b"".join(
        pack_frame(*blob, journal=frames[0].journal, number=number) for number, blob in enumerate(blobs)
    )


def _craft_cells(blobs: list[tuple[int, int, int, bytes]], rng: random.Random) -> None:
    tables = [position for position, blob in enumerate(blobs) if blob[0] == TABLE_FRAME]
    position = rng.choice(tables)
    kind, schema, num_rows, payload = blobs[position]
    kinds = table_columns(list(TABLES.values())[schema - 1])
    width = 8 * num_rows
    columns = []
    changed = {rng.randrange(len(kinds)) for _ in range(rng.choice((1, 1, 2, len(kinds))))}
    for index, (_, column_kind) in enumerate(kinds):
        piece = payload[index * width : (index + 1) * width]
        if index in changed:
            is_fraction = column_kind == "fraction"
            values = unpack_column(piece, num_rows, fraction=is_fraction)
            missing = float("nan") if is_fraction else MISSING_INT
            values = [missing if value is None else value for value in values]
            for row in range(num_rows):
                if rng.random() < 0.5:
                    values[row] = rng.choice(_FRACTIONS if is_fraction else _WHOLE)
            piece = pack_column(values, fraction=is_fraction)
        columns.append(piece)
    blobs[position] = (kind, schema, num_rows, b"".join(columns))


def _craft_rows(blobs: list[tuple[int, int, int, bytes]], rng: random.Random) -> None:
    schema = rng.randrange(1, len(TABLES) + 1)
    num_rows = rng.choice((0, 1, 3, 50))
    columns = [
        pack_column(
            [rng.choice(_FRACTIONS if kind == "fraction" else _WHOLE) for _ in range(num_rows)],
            fraction=kind == "fraction",
        )
        for _, kind in table_columns(list(TABLES.values())[schema - 1])
    ]
    blobs.insert(rng.randrange(2, len(blobs) + 1), (TABLE_FRAME, schema, num_rows, b"".join(columns)))


def _craft_document(blobs: list[tuple[int, int, int, bytes]], rng: random.Random) -> None:
    documents = [position for position, blob in enumerate(blobs) if blob[0] == JSON_FRAME]
    position = rng.choice(documents)
    value = json.loads(blobs[position][3])
    _change_inside(value, rng)
    blobs[position] = (JSON_FRAME, 0, 1, json.dumps(value).encode())


# ---- cases and verdicts ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    files: Files
    is_crafted: bool  # absurd under right checksums: nothing can be said about the rows


def draw_case(originals: Sequence[Files], rng: random.Random) -> Case:
    """One mutated copy of one of the runs."""
    files = dict(rng.choice(originals))
    journals = [name for name in files if name.endswith(".journal")]
    documents = [name for name in files if name.endswith(".json")]
    others = [data for run in originals for name, data in run.items() if name.endswith(".journal")]
    choice = rng.random()
    if choice < 0.12:
        name = rng.choice(documents)
        files[name] = _damaged_json(files[name], rng)
        return Case("JSON files", files, False)
    name = rng.choice(journals)
    if choice < 0.4:
        files[name] = _craft(files[name], rng)
        return Case("crafted", files, True)
    kind = rng.choice(tuple(DAMAGES))
    for changed in {name, rng.choice(journals)} if rng.random() < 0.2 else {name}:
        files[changed] = DAMAGES[kind](files[changed], rng, others)
    return Case(kind, files, False)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What reading a case gave. `wrong` says what must not be, "" where all is well."""

    outcome: str  # refused, damage reported, or whole
    wrong: str
    cpu_s: float
    num_rows: int


@dataclass(frozen=True, slots=True)
class Written:
    """All that was written of the runs: every row and document with how often it stands there."""

    rows: Multiset[object]
    ranks: tuple[RankRun, ...]


def read_written(directories: Sequence[Path]) -> Written:
    ranks = tuple(rank for directory in directories for rank in load_run(directory).ranks)
    rows = Multiset(row for rank in ranks for row in _rows(rank))
    for directory in directories:
        for journal in directory.glob("*.journal"):
            # A journal says twice, and again when the device is known, who writes it; the last one counts.
            for name, value in read_journal(journal).documents:
                if name == "process":
                    rows[ProcessInfo(**value)] += 1
    return Written(rows, ranks)


def judge(case: Case, directory: Path, written: Written, *, with_report: bool = False) -> Verdict:
    """Read the files in `directory` as `show`, `show --json` and the closing summary do."""
    begin_s = time.process_time()
    warnings.simplefilter("error")  # numpy's would reach the user's terminal
    try:
        run = load_run(directory)
        analysis = analyze(run, choose_hardware(run, None, None))
        json.dumps(analysis_to_json(analysis), allow_nan=False)
        print_analysis(analysis, Console(file=io.StringIO(), width=110))
        print_summary(analysis, Console(file=io.StringIO(), width=110))
        if with_report:
            from memadvisor.report.page import render

            render(analysis)
    except MemadvisorError:
        return Verdict("refused", "", time.process_time() - begin_s, 0)
    cpu_s = time.process_time() - begin_s
    num_rows = sum(len(getattr(rank, table)) for rank in run.ranks for table in TABLES)
    wrong = "" if case.is_crafted else _wrong_rows(run, written)
    return Verdict("damage reported" if run.problems else "whole", wrong, cpu_s, num_rows)


def _wrong_rows(run: Run, written: Written) -> str:
    """Rows that nobody wrote, rows that stand more often than written, and gaps that nobody reports."""
    for rank in run.ranks:
        rows = Multiset(_rows(rank))
        if rows - written.rows:
            return f"rank {rank.process.rank} has rows that were never written"
        if rank.ending is not None and not run.problems:
            same = [other for other in written.ranks if other.process == rank.process]
            if not same or Multiset(_rows(same[0])) != rows:
                return f"rank {rank.process.rank} lacks rows, and no problem says so"
    return ""


def _rows(rank: RankRun) -> list[object]:
    documents = [rank.process, *rank.notes, *([rank.ending] if rank.ending is not None else [])]
    return documents + [row for table in TABLES for row in getattr(rank, table)]


def frame_starts(data: bytes) -> list[int]:
    """Where the frames of an undamaged journal begin."""
    starts, position = [], 0
    while position + HEADER.size <= len(data):
        starts.append(position)
        position += HEADER.size + HEADER.unpack_from(data, position)[5]
    return starts


def _split(data: bytes) -> list[bytes]:
    starts = frame_starts(data)
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
