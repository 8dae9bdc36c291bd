"""Files that a user names are written whole or not at all, and what is no file of theirs is left what it is; what they
name to be read is read within bounds."""

import contextlib
import os
import stat
import threading
from pathlib import Path

import pytest

from memadvisor.errors import UsageError
from memadvisor.run.files import MOST_INPUT_BYTES, check_output, read_input, write_output


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path):
    """As root, a rename would put a file in the place of /dev/stdout or /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()

    write_output(pipe, "plan\n")
    reader.join(timeout=20)

    assert read == ["plan\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link, file = tmp_path / "plan.json", tmp_path / "elsewhere" / "plan.json"
    link.symlink_to(file)
    for text in ("first", "second"):  # where the file is not there yet, and where it is
        write_output(link, text)

        assert link.is_symlink() and file.read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "plan.json", "plan.json"]


@pytest.mark.parametrize("name", ["", "missing/plan.json", "folder"])
def test_what_cannot_be_written_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()

    with pytest.raises(UsageError, match=f"'{name}'"):
        write_output(name, "text")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_a_device_is_no_input_and_a_file_larger_than_any_plan_neither(tmp_path):
    """/dev/zero would be read until memory is full."""
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MOST_INPUT_BYTES + 1)

    with pytest.raises(OSError, match="no regular file"):
        read_input(Path("/dev/zero"))
    with pytest.raises(OSError, match="larger than 64 MiB"):
        read_input(large)


def test_a_pipe_is_read_to_its_end_and_one_without_end_is_refused(tmp_path):
    """`--plan <(command)` names a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write(pieces, piece):
        with contextlib.suppress(BrokenPipeError), pipe.open("wb") as file:
            for _ in range(pieces):
                file.write(piece)

    for pieces, piece in ((1, b"\xef\xbb\xbf{}\r\n"), (10**9, bytes(2**20))):
        writer = threading.Thread(target=write, args=(pieces, piece), daemon=True)
        writer.start()
        if pieces == 1:
            assert read_input(pipe) == "{}\n"
        else:
            with pytest.raises(OSError, match="larger than 64 MiB"):
                read_input(pipe)
        writer.join(timeout=60)
        assert not writer.is_alive()


def test_an_output_that_cannot_be_written_is_known_before_it_is(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    check_output(file)
    check_output(tmp_path / "new")
    check_output("/dev/stdout")
    for path in (tmp_path, tmp_path / "nowhere" / "new", file / "new"):
        with pytest.raises(UsageError) as before:
            check_output(path)
        with pytest.raises(UsageError) as after:
            write_output(path, "")
        assert before.value.args == after.value.args
    assert sorted(tmp_path.iterdir()) == [file]
