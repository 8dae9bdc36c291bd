"""A command's exit code is about the run, whoever reads what it prints; a full disk is one line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.make_run import make_run, write_run

FULL = "/dev/full"  # a device that has no room


@pytest.fixture
def run_directory(tmp_path):
    return write_run(make_run(num_ranks=1), tmp_path / "run")


def memadvisor(*words, shell=""):
    """Exit code and stderr of a command whose stdout `shell` has redirected."""
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "memadvisor", *map(str, words)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def read_by_nobody(*words):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as stdout:
        command = [sys.executable, "-m", "memadvisor", *map(str, words)]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stderr


LAYOUT = ("estimate", "--model", "gpt2", "--gpus", "1xH100", "--seq", "128", "--tp", "1")


def test_limits_that_hold_still_hold_where_nobody_reads_on(run_directory):
    """Exit code 1 would say that one is broken."""
    held = ("check", run_directory, "--max-peak", "1GiB")
    broken = ("check", run_directory, "--max-peak", "1KiB")

    assert read_by_nobody(*held) == (0, "")
    assert read_by_nobody(*broken) == (1, "")
    assert read_by_nobody(*LAYOUT) == (0, "")


def test_a_closed_stdout_is_no_error(run_directory):
    for words in (("show", run_directory), ("check", run_directory, "--max-peak", "1GiB", "--json")):
        assert memadvisor(*words, shell=">&-") == (0, "")


@pytest.mark.skipif(not Path(FULL).exists(), reason="no device that is always full")
@pytest.mark.parametrize("words", [("show",), ("show", "--json"), LAYOUT])
def test_a_full_disk_is_one_line_and_code_2(words, run_directory):
    words = words if words == LAYOUT else (*words, run_directory)
    code, errors = memadvisor(*words, shell=f">{FULL}")

    assert code == 2
    assert errors.splitlines() == [
        f"memadvisor {words[0]}: stdout cannot be written: No space left on device. Hint: send it elsewhere, or make room."
    ]


def test_ctrl_c_ends_a_command_without_a_traceback(tmp_path):
    """While it waits for its input: nobody writes into this pipe."""
    pipe = tmp_path / "plan.json"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "memadvisor", "export", str(pipe), "--to", "deepspeed"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, and all that they start, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline_s = time.monotonic() + 10
        while not _waits(process.pid) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)

    assert (process.returncode, out, errors) == (130, "", "")


def _waits(pid):
    """Whether it sleeps in opening the pipe, where the system tells."""
    try:
        return "fifo" in Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
    except OSError:
        return False
