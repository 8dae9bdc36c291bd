"""`memadvisor calibrate`: figures on the screen and in a file that `--hardware` reads."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memadvisor.calibrate import arithmetic
from memadvisor.cli.main import main
from memadvisor.hardware.load import load_hardware


def test_what_was_measured_is_printed_and_kept(tmp_path, capsys, monkeypatch):
    """One rank measures arithmetic alone; here for a tenth of the time, for no figure is judged."""
    monkeypatch.setattr(arithmetic, "_BUDGET_S", arithmetic._BUDGET_S / 10)
    path = tmp_path / "hardware.json"
    assert main(["calibrate", "--ranks", "1", "-o", str(path)]) == 0

    text = capsys.readouterr().out
    assert "float32 matrix product" in text and "measured" in text and "AdamW  fused" in text
    found = load_hardware(str(path))
    assert found.kind == "measured"
    best = max(rate.flops_per_s for rate in found.matmuls if rate.dtype == "float32")
    assert found.peak_flops_per_s["float32"] == best > 1e8
    assert found.memory_bandwidth_bytes_per_s > 1e8
    assert found.collectives == ()
    assert {row.implementation for row in found.optimizers} == {"fused", "foreach"}


def test_a_number_of_ranks_that_is_none_is_one_line(capsys):
    assert main(["calibrate", "--ranks", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_told_before_minutes_of_measuring(capsys, monkeypatch):
    monkeypatch.setattr(arithmetic, "_BUDGET_S", None)  # any measurement would fail
    assert main(["calibrate", "--ranks", "1", "-o", "/nowhere/hardware.json"]) == 2
    assert "'/nowhere/hardware.json' cannot be written: No such file or directory." in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc for the ranks")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ended_by_a_signal_it_leaves_neither_ranks_nor_files(tmp_path, number):
    """Its ranks would compute on, in a directory that nobody takes away. Killed, it can take away nothing itself."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "memadvisor", "calibrate", "--ranks", "2"],
        env={**os.environ, "TMPDIR": str(scratch)},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: list(scratch.glob("memadvisor-*/store")))  # the ranks have found each other
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(ranks) >= 2
        process.send_signal(number)
        assert process.wait(timeout=60) == (-number if number == signal.SIGKILL else 128 + number)
        wait_until(lambda: not any(map(works, ranks)), 10)  # they would measure for twenty seconds more
        assert number == signal.SIGKILL or list(scratch.glob("memadvisor-*")) == []
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_until(condition, limit_s=60):
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def works(pid):
    """Nothing is left of a zombie but its number."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False
