"""Files that a user names are whole or absent, and what is no file of theirs is left what it is."""

import os
import stat
import threading

import pytest

from memadvisor.errors import UsageError
from memadvisor.run.files import write_output


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
