"""Rows that are read are rows that were written, whatever happens to the file in between."""

import dataclasses
import json
import os
import random
import stat
import subprocess
import sys
import typing
from collections import Counter as Multiset

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.run import journal as journal_module
from memadvisor.run.documents import Note, ProcessInfo
from memadvisor.run.frames import (
    JSON_FRAME,
    LARGEST_FRACTION,
    LARGEST_WHOLE,
    MAX_RAW_BYTES,
    SMALLEST_FRACTION,
    STRINGS_FRAME,
    TABLE_FRAME,
    pack_frame,
    read_frames,
)
from memadvisor.run.journal import JournalWriter, read_journal, table_columns
from memadvisor.run.records import TABLES, Module, Residual, Span, Unit

PROCESS = ProcessInfo(
    rank=0, world_size=1, local_rank=0, pid=1, host="here", device="cpu", device_name="cpu",
    device_memory_bytes=None, num_threads=1, unix_offset_s=1.5e9, start_s=10.0, torch_version="2", python_version="3",
)  # fmt: skip


def values_of(annotation):
    optional = type(None) in typing.get_args(annotation)
    kind = typing.get_args(annotation)[0] if optional else annotation
    values = {
        int: st.integers(-LARGEST_WHOLE, LARGEST_WHOLE),
        float: st.just(0.0)
        | st.floats(SMALLEST_FRACTION, LARGEST_FRACTION)
        | st.floats(-LARGEST_FRACTION, -SMALLEST_FRACTION),
        bool: st.booleans(),
        str: st.text(st.characters(), max_size=12),
    }[kind]
    return st.none() | values if optional else values


def rows_of(row_type):
    hints = typing.get_type_hints(row_type)
    return st.lists(st.builds(row_type, **{n: values_of(h) for n, h in hints.items()}), max_size=5)


def write(path, batches, documents=()):
    writer = JournalWriter(path)
    for table, rows in batches:
        writer.write_rows(table, rows)
    for name, value in documents:
        writer.write_document(name, value)
    writer.close()
    return path


def all_rows(contents):
    return Multiset(row for rows in contents.rows.values() for row in rows)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_table_comes_back(tmp_path_factory, data):
    tables = data.draw(st.lists(st.sampled_from(sorted(TABLES)), max_size=6))
    batches = [(table, data.draw(rows_of(TABLES[table]))) for table in tables]
    path = tmp_path_factory.mktemp("journal") / "rank0.pid1.journal"

    contents = read_journal(write(path, batches))

    assert contents.problems == []
    for table in TABLES:
        assert contents.rows[table] == [row for name, rows in batches if name == table for row in rows]
        assert all(isinstance(row, TABLES[table]) for row in contents.rows[table])


def test_long_tables_are_split_and_come_back(tmp_path):
    rows = [Module(f"layer{n % 7}", "Linear", f"unit{n}") for n in range(25_001)]

    contents = read_journal(write(tmp_path / "j", [("modules", rows)]))

    assert contents.rows["modules"] == rows
    assert contents.problems == []


def test_documents_come_back_in_order(tmp_path):
    notes = [("note", {"level": "info", "text": f"\u202e[red]{n}\x00", "time_s": n / 3}) for n in range(3)]

    assert read_journal(write(tmp_path / "j", [], notes)).documents == notes


def example_journal(path, seed):
    """Many small frames, strings between them: (bytes, rows written)."""
    choose = random.Random(seed)
    batches = []
    for _ in range(12):
        rows = [
            Module(
                f"name{choose.randrange(60)}", f"type{choose.randrange(60)}", f"unit{choose.randrange(60)}"
            )
            for _ in range(choose.randrange(1, 9))
        ]
        batches.append(("modules", rows))
        batches.append(("residuals", [Residual(choose.random(), choose.randrange(10**9)) for _ in range(4)]))
    write(path, batches, [("process", dataclasses.asdict(PROCESS))])
    return path.read_bytes(), Multiset(row for _, rows in batches for row in rows)


def flip(data, choose):
    damaged = bytearray(data)
    for _ in range(choose.choice((1, 1, 2, 20))):
        damaged[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    return bytes(damaged)


def cut_out(data, choose):
    start, stop = sorted(choose.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[stop:]


def insert(data, choose):
    start, stop = sorted(choose.randrange(len(data) + 1) for _ in range(2))
    position = choose.randrange(len(data) + 1)
    return data[:position] + data[start:stop] + data[position:]


def overwrite(data, choose):
    position = choose.randrange(len(data))
    garbage = choose.randbytes(choose.randrange(1, 200))
    return data[:position] + garbage + data[position + len(garbage) :]


def whole_frames_moved(data, choose):
    frames = split_frames(data)
    kept = [choose.choice(frames) for _ in range(2 * len(frames))]
    return b"".join(kept)


def split_frames(data):
    starts = []
    position = 0
    while position < len(data):
        starts.append(position)
        position += 32 + int.from_bytes(data[position + 12 : position + 16], "little")
    return [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]


@pytest.mark.parametrize("mutate", [flip, cut_out, insert, overwrite, whole_frames_moved])
def test_a_mutated_journal_gives_no_row_that_was_not_written(tmp_path, mutate):
    """As a multiset: no wrong row, no wrong name in a row, no row twice. And never an exception."""
    choose = random.Random(mutate.__name__)
    path = tmp_path / "rank0.pid1.journal"
    for trial in range(60):
        path.unlink(missing_ok=True)
        data, written = example_journal(path, trial)
        path.write_bytes(mutate(data, choose))

        assert all_rows(read_journal(path)) <= written


def test_a_lost_strings_frame_costs_the_rows_that_need_it_and_no_other(tmp_path):
    path = write(tmp_path / "j", [("modules", [Module("a", "b", "c")]), ("modules", [Module("a", "b", "d")])])
    frames = split_frames(path.read_bytes())
    lost = next(n for n, f in enumerate(frames) if f[5] == STRINGS_FRAME)
    path.write_bytes(b"".join(frames[:lost] + frames[lost + 1 :]))
    assert read_journal(path).rows["modules"] == []

    path.write_bytes(b"".join(f for n, f in enumerate(frames) if n == lost or f[5] != STRINGS_FRAME))
    contents = read_journal(path)

    assert contents.rows["modules"] == [Module("a", "b", "c")]
    assert any("1 rows of modules" in problem for problem in contents.problems)


def test_a_missing_frame_is_reported(tmp_path):
    path = write(tmp_path / "j", [("residuals", [Residual(1.0, n)]) for n in range(5)])
    frames = split_frames(path.read_bytes())
    path.write_bytes(b"".join(frames[:3] + frames[4:]))
    contents = read_journal(path)

    assert len(contents.rows["residuals"]) == 4
    assert contents.problems == ["j: 1 frame is missing before frame 4"]


def test_a_frame_that_stands_twice_is_read_once(tmp_path):
    path = write(tmp_path / "j", [("residuals", [Residual(1.0, 2)])])
    path.write_bytes(path.read_bytes() + split_frames(path.read_bytes())[-1])
    contents = read_journal(path)

    assert contents.rows["residuals"] == [Residual(1.0, 2)]
    assert len(contents.problems) == 1


def test_frames_of_another_journal_are_read_by_its_own_names(tmp_path):
    """Two journals in one file: each one's strings start at 0, and none takes the other's."""
    first = write(tmp_path / "a", [("modules", [Module("one", "two", "three")])])
    second = write(tmp_path / "b", [("modules", [Module("four", "five", "six")])])
    first.write_bytes(first.read_bytes() + second.read_bytes())

    assert read_journal(first).rows["modules"] == [
        Module("one", "two", "three"),
        Module("four", "five", "six"),
    ]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_frames_with_right_checksums_and_wrong_contents_raise_nothing(tmp_path_factory, data):
    """What damage cannot make but malice can: every row that is read still has its fields' types."""
    documents = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["schemas", "schema", "table", "columns", "first", "strings", "process", "x"]), inner, max_size=3),
        max_leaves=8,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("hostile") / "j"
    write(path, [("modules", [Module("a", "b", "c")])])
    frames = [path.read_bytes()]
    for number in range(100, 100 + data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from([JSON_FRAME, STRINGS_FRAME, TABLE_FRAME, 9]))
        payload = (
            json.dumps(data.draw(documents)).encode()
            if kind != TABLE_FRAME
            else data.draw(st.binary(max_size=120))
        )
        journal = int.from_bytes(frames[0][20:24], "little")
        rows = data.draw(st.integers(0, 6) | st.just(2**32 - 1))
        frames.append(
            pack_frame(kind, data.draw(st.integers(0, 14)), rows, payload, journal=journal, number=number)
        )
    path.write_bytes(b"".join(frames))

    for table, rows in read_journal(path).rows.items():
        hints = typing.get_type_hints(TABLES[table])
        for row in rows:
            for name, hint in hints.items():
                assert isinstance(getattr(row, name), typing.get_args(hint) or hint)


def hostile_schema(path, columns, num_rows, payload):
    writer = JournalWriter(path)
    journal = int.from_bytes(path.read_bytes()[20:24], "little")
    writer.close()
    schemas = json.dumps({"schemas": [{"schema": 99, "table": "residuals", "columns": columns}]}).encode()
    with path.open("ab") as file:
        file.write(pack_frame(JSON_FRAME, 0, 1, schemas, journal=journal, number=2))
        file.write(pack_frame(TABLE_FRAME, 99, num_rows, payload, journal=journal, number=3))
    return read_journal(path)


def test_a_table_without_columns_cannot_claim_four_billion_rows(tmp_path):
    contents = hostile_schema(tmp_path / "j", [], 2**32 - 1, b"")

    assert contents.rows["residuals"] == []
    assert len(contents.problems) == 1


def test_a_column_of_another_kind_is_refused(tmp_path):
    columns = [["time_s", "text"], ["unexplained_bytes", "whole"]]

    assert hostile_schema(tmp_path / "j", columns, 1, bytes(16)).rows["residuals"] == []


def test_a_newer_minor_version_is_readable(tmp_path, monkeypatch):
    """A later version's tables, columns, documents and frame types are left out; the rest is read."""

    @dataclasses.dataclass(frozen=True, slots=True)
    class Residual2:
        added: str
        time_s: float
        unexplained_bytes: int
        more: float | None

    @dataclasses.dataclass(frozen=True, slots=True)
    class Novelty:
        text: str

    path = tmp_path / "j"
    with monkeypatch.context() as later:
        later.setitem(TABLES, "residuals", Residual2)
        later.setitem(TABLES, "novelties", Novelty)
        writer = JournalWriter(path)
        writer.write_rows("residuals", [Residual2("new", 1.5, 7, None)])
        writer.write_rows("novelties", [Novelty("unheard of")])
        writer.write_document("novelty", {"of": "a later version"})
        later.setattr(journal_module, "JSON_FRAME", 77)
        writer.write_document("note", "a frame type of a later version")
        writer.close()
    contents = read_journal(path)

    assert contents.rows["residuals"] == [Residual(1.5, 7)]
    assert contents.problems == []
    assert set(contents.rows) == set(TABLES)


def test_an_older_version_lacks_optional_columns_only(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True, slots=True)
    class OldCounter:
        time_s: float
        allocated_bytes: int | None

    path = tmp_path / "j"
    with monkeypatch.context() as earlier:
        earlier.setitem(TABLES, "counters", OldCounter)
        write(path, [("counters", [OldCounter(1.0, 5)])])
    [row] = read_journal(path).rows["counters"]

    assert (row.time_s, row.allocated_bytes, row.resident_bytes) == (1.0, 5, None)


def test_a_forked_child_writes_nothing_into_its_parents_journal(tmp_path):
    writer = JournalWriter(tmp_path / "j")
    writer.write_rows("residuals", [Residual(1.0, 1)])
    child = os.fork()
    if child == 0:
        writer.write_rows("residuals", [Residual(2.0, 2)])
        writer.write_document("note", dataclasses.asdict(Note(level="info", text="child", time_s=None)))
        writer.close()
        os._exit(0)
    os.waitpid(child, 0)
    writer.write_rows("residuals", [Residual(3.0, 3)])
    writer.close()
    contents = read_journal(tmp_path / "j")

    assert contents.rows["residuals"] == [Residual(1.0, 1), Residual(3.0, 3)]
    assert (contents.documents, contents.problems) == ([], [])


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from memadvisor.run.journal import JournalWriter
from memadvisor.run.records import Residual
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JournalWriter(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (writer.num_bytes + 2000, resource.RLIM_INFINITY))
for n in range(1000):
    writer.write_rows("residuals", [Residual(float(n), n)])
print(type(writer.failure).__name__, writer.num_bytes)
writer.write_document("note", {"after": "the failure"})
writer.close()
"""


def test_a_full_disk_ends_the_journal_and_not_the_training(tmp_path):
    path = tmp_path / "j"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], check=True, capture_output=True, text=True
    )
    contents = read_journal(path)
    numbers = [row.unexplained_bytes for row in contents.rows["residuals"]]

    assert done.stdout.split()[0] == "OSError"
    assert int(done.stdout.split()[1]) <= path.stat().st_size
    assert 0 < len(numbers) < 1000
    assert numbers == list(range(len(numbers)))
    assert contents.problems == []


def test_a_closed_descriptor_is_a_failure_that_is_kept(tmp_path):
    writer = JournalWriter(tmp_path / "j")
    os.close(writer._fd)
    writer.write_rows("residuals", [Residual(1.0, 1)])
    writer.write_rows("residuals", [Residual(2.0, 2)])

    assert isinstance(writer.failure, OSError)


def test_a_script_that_takes_over_the_descriptor_keeps_its_file(tmp_path):
    """`os.closerange` and an `open` give a script our number; its file is not ours to write or close."""
    writer = JournalWriter(tmp_path / "j")
    theirs = os.open(tmp_path / "theirs", os.O_WRONLY | os.O_CREAT)
    os.dup2(theirs, writer._fd)
    number = writer._fd
    writer.write_rows("residuals", [Residual(1.0, 1)])
    writer.close()

    assert isinstance(writer.failure, OSError)
    assert os.write(number, b"mine") == 4
    assert (tmp_path / "theirs").read_bytes() == b"mine"
    os.close(number)
    os.close(theirs)


def test_a_journal_is_private_and_never_overwritten(tmp_path):
    old_umask = os.umask(0)
    try:
        JournalWriter(tmp_path / "j").close()
    finally:
        os.umask(old_umask)

    assert stat.S_IMODE((tmp_path / "j").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        JournalWriter(tmp_path / "j")


def test_too_long_a_text_is_cut_and_marked(tmp_path):
    rows = [Module("x" * 30_000, "Linear", str(n) * 9_000) for n in range(300)]
    contents = read_journal(write(tmp_path / "j", [("modules", rows)]))

    assert contents.problems == []
    assert {len(row.name) for row in contents.rows["modules"]} == {10_000}
    assert contents.rows["modules"][0].name.endswith("...")
    assert [row.unit for row in contents.rows["modules"]][:2] == ["0" * 9_000, "1" * 9_000]


def test_a_frame_of_strings_stays_under_the_limit(tmp_path):
    """The worst case: text of which every character takes twelve bytes of JSON."""
    rows = [Module(chr(0x1F600 + n) * 9_999, "t", "u") for n in range(200)]
    path = write(tmp_path / "j", [("modules", rows)])
    contents = read_journal(path)

    assert contents.rows["modules"] == rows
    assert max(len(f.payload) for f in read_frames(path.read_bytes())) < MAX_RAW_BYTES


def test_what_every_step_appends_is_readable_at_once(tmp_path):
    writer = JournalWriter(tmp_path / "j")
    for step in range(5):
        writer.write_rows("spans", [Span(step, "forward", f"unit{step}", 0, 1.0, 2.0)])

        assert len(read_journal(tmp_path / "j").rows["spans"]) == step + 1


def test_a_column_that_came_later_has_its_default(tmp_path, monkeypatch):
    """A run of an older version keeps its units, though it says nothing of what they share."""
    unit = Unit("blocks.0", "Block", True, 1, 4, 4, is_shared=True)
    monkeypatch.setattr(
        journal_module, "table_columns", lambda kind: [c for c in table_columns(kind) if c[0] != "is_shared"]
    )
    write(tmp_path / "j", [("units", [unit])])
    monkeypatch.undo()
    contents = read_journal(tmp_path / "j")
    assert contents.rows["units"] == [dataclasses.replace(unit, is_shared=False)]
    assert not contents.problems
