"""A run directory is read for whatever of it is whole; only what is no run at all is refused."""

import dataclasses
import json
import os
import random
import stat
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.capture.script import Target
from memadvisor.capture.session import start_manifest
from memadvisor.errors import RunFormatError, UsageError
from memadvisor.run.frames import JSON_FRAME, MAJOR, pack_frame
from memadvisor.run.journal import JournalWriter
from memadvisor.run.records import TABLES
from memadvisor.run.run import Run
from memadvisor.run.store import (
    create_run_directory,
    discard_empty_run,
    join_run_directory,
    journal_path,
    load_run,
    write_manifest,
)
from tests.make_run import make_run, write_run

RUN = make_run(num_ranks=2)


@pytest.fixture
def directory(tmp_path):
    return write_run(RUN, tmp_path / "run")


def journals_of(directory):
    return sorted(directory.glob("rank*.journal"))


def edit_manifest(directory, **changes):
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_run_comes_back_as_it_was(directory):
    loaded = load_run(directory)

    assert dataclasses.replace(loaded, path=RUN.path) == RUN
    assert loaded.is_finished


def test_a_missing_directory_a_file_and_an_empty_directory_are_no_runs(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name, words in (("gone", "does not exist"), ("file", "not a directory"), ("empty", "is not a run")):
        with pytest.raises(RunFormatError, match=words):
            load_run(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_directory_is_refused_in_words(directory):
    directory.chmod(0)
    with pytest.raises(RunFormatError, match="cannot be read"):
        load_run(directory)


def test_a_later_major_version_is_refused_by_name(directory):
    edit_manifest(directory, format=[MAJOR + 1, 0])

    with pytest.raises(RunFormatError, match=f"format {MAJOR + 1}"):
        load_run(directory)


def test_a_later_minor_version_is_read(directory):
    edit_manifest(directory, format=[MAJOR, 99], novelty={"of": "it"})

    assert load_run(directory).ranks == RUN.ranks


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        "null",
        "[" * 100_000,
        '{"format": [1e400, 0]}',
        '{"format": "10", "memadvisor_version": 1}',
        "\xff\xfe",
    ],
)
def test_without_its_manifest_a_run_is_still_read(directory, text):
    path = directory / "manifest.json"
    path.unlink() if text is None else path.write_bytes(text.encode("latin-1"))
    loaded = load_run(directory)

    assert loaded.ranks == RUN.ranks
    assert loaded.manifest.world_size == 2
    assert any("manifest.json" in problem for problem in loaded.problems)


@pytest.mark.parametrize("change", [{"world_size": 10**30}, {"created_unix_s": float("inf")}, {"script": 7}])
def test_a_manifest_of_nonsense_counts_as_damaged(directory, change):
    edit_manifest(directory, **change)

    assert load_run(directory).manifest.script == "unknown"


def test_ranks_that_wrote_nothing_are_named(directory):
    journals_of(directory)[0].unlink()
    loaded = load_run(directory)

    assert loaded.missing_ranks == (0,)
    assert not loaded.is_finished


def test_what_was_written_before_a_kill_is_there(directory):
    """At every cut of a journal the rows are a prefix of each table, and nothing is called damaged."""
    journal = journals_of(directory)[0]
    whole = journal.read_bytes()
    step = max(1, len(whole) // 40)
    described = 3800  # bytes that the frames before the first row take, at most
    for length in range(len(whole) - 1, described, -step):
        journal.write_bytes(whole[:length])
        loaded = load_run(directory)
        assert loaded.problems == ()
        for table in TABLES:
            rows, written = getattr(loaded.ranks[0], table), getattr(RUN.ranks[0], table)
            assert rows == written[: len(rows)]


@pytest.mark.parametrize("seed", range(40))
def test_a_mutated_run_raises_nothing_but_its_own_error_and_soon(directory, seed):
    choose = random.Random(seed)
    for path in directory.iterdir():
        data = bytearray(path.read_bytes())
        for _ in range(choose.randrange(4)):
            start = choose.randrange(len(data))
            action = choose.randrange(3)
            if action == 0:
                data[start] ^= 1 << choose.randrange(8)
            elif action == 1:
                del data[start : start + choose.randrange(2000)]
            else:
                data[start:start] = data[choose.randrange(len(data)) :][:2000]
            data = data or bytearray(b"\0")
        path.write_bytes(data)
    started_s = time.process_time()
    try:
        loaded = load_run(directory)
    except RunFormatError as error:
        assert "\n" not in error.one_line()
    else:
        for rank in loaded.ranks:
            written = RUN.ranks[rank.process.rank]
            for table in TABLES:
                assert set(getattr(rank, table)) <= set(getattr(written, table))
    assert time.process_time() - started_s < 5


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_process_of_nonsense_is_refused(tmp_path_factory, data):
    """Right checksums, wrong contents: a field of a wrong type, or a rank that cannot be."""
    value = dataclasses.asdict(RUN.ranks[0].process)
    field = data.draw(st.sampled_from(sorted(value)))
    value[field] = data.draw(JSON)
    directory = tmp_path_factory.mktemp("run")
    writer = JournalWriter(directory / "rank0.pid1.journal")
    writer.write_document("process", value)
    writer.write_document("note", data.draw(JSON))
    writer.write_document("ending", data.draw(JSON))
    writer.close()
    try:
        loaded = load_run(directory)
    except RunFormatError:
        return
    assert isinstance(loaded, Run)
    assert type(getattr(loaded.ranks[0].process, field)) is type(value[field]) or isinstance(
        value[field], int
    )


def test_a_later_minor_version_may_add_fields_to_a_document(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    writer = JournalWriter(directory / "rank0.pid1.journal")
    writer.write_document("process", {**dataclasses.asdict(RUN.ranks[0].process), "novelty": 1})
    writer.close()

    assert load_run(directory).ranks[0].process == RUN.ranks[0].process


def test_a_journal_without_its_process_frame_is_no_rank(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    JournalWriter(directory / "rank0.pid1.journal").close()

    with pytest.raises(RunFormatError, match="no readable rank"):
        load_run(directory)


def test_one_damaged_copy_of_a_vital_document_loses_nothing(directory):
    """Schemas and process stand twice: a flipped bit anywhere in the first copy changes no row."""
    journal = journals_of(directory)[0]
    whole = journal.read_bytes()
    for position in range(40, 100, 7):
        journal.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])

        assert load_run(directory).ranks == RUN.ranks


def test_two_journals_of_one_rank_are_reported(directory):
    other = directory / "rank0.pid999999.journal"
    other.write_bytes(journals_of(directory)[0].read_bytes())
    loaded = load_run(directory)

    assert loaded.ranks == RUN.ranks
    assert any("two journals" in problem for problem in loaded.problems)


def test_a_pipe_called_journal_does_not_stop_the_reader(directory):
    os.mkfifo(directory / "rank7.pid7.journal")
    (directory / "rank8.pid8.journal").mkdir()

    assert load_run(directory).ranks == RUN.ranks


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
def test_pipes_and_devices_in_a_run_are_problems_and_nobody_waits_for_them(directory, name):
    for put in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (directory / name).unlink(missing_ok=True)
        put(directory / name)
        loaded = load_run(directory)

        assert loaded.ranks == RUN.ranks
        assert [problem for problem in loaded.problems if name in problem]


def test_a_frame_of_a_later_major_version_is_reported(directory):
    journal = journals_of(directory)[0]
    data = journal.read_bytes()
    identity = int.from_bytes(data[20:24], "little")
    later = bytearray(pack_frame(JSON_FRAME, 0, 1, b"{}", journal=identity, number=10**6))
    later[4] = MAJOR + 1
    later[28:32] = bytes(4)
    later[28:32] = zlib.crc32(bytes(later)).to_bytes(4, "little")
    journal.write_bytes(data + bytes(later))
    loaded = load_run(directory)

    assert loaded.ranks == RUN.ranks
    assert any("later format" in problem for problem in loaded.problems)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1}', "nonsense"])
def test_a_damaged_plan_is_a_problem_and_not_an_error(directory, text):
    (directory / "plan.json").write_text(text)
    loaded = load_run(directory)

    assert loaded.plan is None
    assert any("plan.json" in problem for problem in loaded.problems)


def test_a_run_is_private(tmp_path):
    directory = tmp_path / "run"
    old_umask = os.umask(0)
    try:
        create_run_directory(directory)
        write_manifest(directory, RUN.manifest)
        JournalWriter(journal_path(directory, 0)).close()
    finally:
        os.umask(old_umask)

    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert len(list(directory.iterdir())) == 2


def test_the_first_manifest_stands(directory):
    write_manifest(directory, dataclasses.replace(RUN.manifest, script="another.py"))

    assert load_run(directory).manifest.script == RUN.manifest.script


def test_only_one_of_two_that_found_a_directory_empty_begins_a_run_in_it(tmp_path):
    for _ in range(2):  # both look before either writes
        create_run_directory(tmp_path / "run")
    target = Target(name="train.py", is_module=False, arguments=())
    start_manifest(tmp_path / "run", target, 1, "0.1.0", is_alone=True)

    with pytest.raises(UsageError, match="Another run has begun"):
        start_manifest(tmp_path / "run", target, 1, "0.1.0", is_alone=True)
    start_manifest(tmp_path / "run", target, 1, "0.1.0", is_alone=False)  # another rank of the first


def test_a_run_that_came_to_nothing_leaves_no_folder_of_runs(tmp_path):
    """A script that never imported torch left an empty memadvisor-runs/ beside it."""
    runs = tmp_path / "memadvisor-runs"
    create_run_directory(runs / "first")
    create_run_directory(runs / "second")

    discard_empty_run(runs / "first")
    assert [path.name for path in runs.iterdir()] == ["second"]
    discard_empty_run(runs / "second")
    assert not runs.exists()

    create_run_directory(tmp_path / "of the user" / "run")
    discard_empty_run(tmp_path / "of the user" / "run")
    assert (tmp_path / "of the user").exists()


def test_a_run_is_never_written_into_another(directory):
    for make in (create_run_directory, lambda path: join_run_directory(path, "launch 2")):
        with pytest.raises(UsageError, match="not empty"):
            make(directory)


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    for make in (create_run_directory, lambda path: join_run_directory(path, "launch")):
        with pytest.raises(UsageError, match="--out"):
            make(tmp_path / "file")
        with pytest.raises(UsageError, match="--out"):
            make(tmp_path / "file" / "below")


def test_a_rank_that_comes_while_another_makes_the_directory_joins_it(tmp_path, monkeypatch):
    link, came = Path.hardlink_to, []

    def another_comes(path, target):
        monkeypatch.setattr(Path, "hardlink_to", link)
        assert [other.name.startswith(".") for other in tmp_path.iterdir()] == [True]
        join_run_directory(tmp_path, "launch")
        came.append(path)
        link(path, target)

    monkeypatch.setattr(Path, "hardlink_to", another_comes)
    join_run_directory(tmp_path, "launch")
    assert came == [tmp_path / ".launch"]
    assert [path.name for path in tmp_path.iterdir()] == [".launch"]


def test_ranks_of_one_launch_share_a_directory_and_those_of_the_next_do_not(tmp_path):
    join_run_directory(tmp_path / "run", "launch 1")
    JournalWriter(tmp_path / "run" / "rank1.pid1.journal").close()
    join_run_directory(tmp_path / "run", "launch 1")

    with pytest.raises(UsageError, match="not empty"):
        join_run_directory(tmp_path / "run", "launch 2")


def test_a_rank_may_come_while_another_is_writing_the_mark_of_their_launch(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".launch.k3_x9").write_text("")  # the other's file, before it has its name

    join_run_directory(tmp_path / "run", "launch 1")

    with pytest.raises(UsageError, match="not empty"):
        join_run_directory(tmp_path / "run", "launch 2")


def test_ranks_that_the_script_started_by_itself_are_named_as_missing(tmp_path):
    """The launcher knew of one rank; the script's process group, by its own account, has two."""
    directory = write_run(make_run(num_ranks=1), tmp_path / "run")
    rank = load_run(directory).ranks[0]
    journal = JournalWriter(directory / "rank0.pid999999.journal")
    journal.write_document("process", dataclasses.asdict(dataclasses.replace(rank.process, world_size=2)))
    journal.write_rows("steps", rank.steps)
    journal.close()

    run = load_run(directory)

    assert run.missing_ranks == (1,)
    assert run.manifest.world_size == 2  # what advice is for, unless asked otherwise
