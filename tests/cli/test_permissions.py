"""What may not be looked at is named in one line: pathlib's is_dir() and exists() raise there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memadvisor.cli.main import main
from tests.make_run import make_run, write_run

SHAPE = ("--gpus", "1xH100", "--seq", "128", "--tp", "1")
LOOKS_INTO_A_CLOSED_FOLDER = [
    ("show", "{}/run"),
    ("report", "{}/run"),
    ("diff", "run", "{}/run"),
    ("check", "{}/run", "--max-peak", "1GiB"),
    ("advise", "{}/run", "--memory", "1GiB"),
    ("tui", "{}/run"),
    ("show", "run", "--hardware", "{}/device"),
    ("estimate", "--model", "{}", *SHAPE),
    ("estimate", "--model", "{}/config.json", *SHAPE),
    ("profile", "{}/train.py"),
    ("run", "--zero", "0", "{}/train.py"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(make_run(num_ranks=1), tmp_path / "run")
    return tmp_path


@pytest.mark.parametrize("words", LOOKS_INTO_A_CLOSED_FOLDER, ids=lambda words: " ".join(words))
def test_a_folder_that_may_not_be_looked_into(words, here, capsys, monkeypatch):
    """Of root, which may look into any, the system's answer is played."""
    stat = Path.stat

    def refusing(path, **options):
        if "closed" in path.parts[:-1] or (path.name == "config.json" and "closed" in path.parts):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    (here / "closed").mkdir()
    monkeypatch.setattr(Path, "stat", refusing)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: refusing(path) and "")

    code = main([word.format("closed") for word in words])
    errors = capsys.readouterr().err

    assert code == 2
    assert len(errors.splitlines()) == 1 and "cannot be read: Permission denied" in errors, errors


@pytest.mark.parametrize("words", [("show", "{}"), ("show", "run", "--hardware", "{}"), ("profile", "{}")])
def test_a_name_that_is_too_long(words, here, capsys):
    assert main([word.format("x" * 300) for word in words]) == 2

    assert "Traceback" not in capsys.readouterr().err


def test_a_script_that_is_a_link_to_itself(here):
    (here / "loop.py").symlink_to("loop.py")
    command = [sys.executable, "-m", "memadvisor", "profile", "loop.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))

    assert done.returncode == 2
    assert "'loop.py' cannot be read: Too many levels of symbolic links" in done.stderr
