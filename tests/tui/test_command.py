import os
import pty
import select
import subprocess
import sys
import time

import pytest

from memadvisor.cli.main import main
from tests.make_run import make_run, write_run


@pytest.fixture
def run_directory(tmp_path):
    return write_run(make_run(), tmp_path / "run")


def command(*words):
    return [sys.executable, "-m", "memadvisor", "tui", *map(str, words)]


def test_without_a_terminal_there_is_one_line_and_no_escape(run_directory):
    done = subprocess.run(command(run_directory), stdin=subprocess.DEVNULL, capture_output=True, text=True)

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "needs a terminal" in done.stderr and "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("make", "phrase"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is not a directory"),
    ],
)
def test_what_is_no_directory_is_one_line_and_exit_code_2(tmp_path, capsys, make, phrase):
    make(tmp_path / "run")

    assert main(["tui", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert phrase in error and error.count("\n") == 1


def in_a_terminal(words, keys=b"", *, is_closed=False):
    """Run the command in a pseudo-terminal of 80x24, press keys or close that once it has drawn; exit code and output."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        words, stdin=follower, stdout=follower, stderr=follower, env=environment, close_fds=True
    )
    os.close(follower)
    output = b""
    deadline_s = time.monotonic() + 60
    pressed = not keys
    while time.monotonic() < deadline_s:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                data = os.read(leader, 65536)
            except OSError:  # the other side has closed
                break
            if not data:
                break
            output += data
        if is_closed and b"Peak memory" in output:
            break
        if not pressed and b"Peak memory" in output:
            pressed = True
            os.write(leader, keys)
    os.close(leader)
    return process.wait(timeout=30), output


def test_in_a_terminal_it_draws_and_q_leaves_with_code_0(run_directory):
    code, output = in_a_terminal(command(run_directory), keys=b"q")

    assert code == 0
    assert b"\x1b[?1049h" in output and b"\x1b[?1049l" in output, "the screen is given back"


def test_it_ends_where_its_terminal_is_closed_and_no_signal_says_so(run_directory):
    in_a_terminal(command(run_directory), is_closed=True)  # which waits for its end


def test_a_directory_that_is_no_run_leaves_the_terminal_with_one_line(tmp_path):
    code, output = in_a_terminal(command(tmp_path))

    assert code == 2
    assert b"is not a run" in output.split(b"\x1b[?1049l")[-1]
