"""Whatever happens to the disk, the process or the other ranks: the training goes on, and what is there is read."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.survival import kill_once
from memadvisor.run.store import load_run
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    ENVIRONMENT.pop(name, None)


def run(*words, python=sys.executable, **environment):
    return subprocess.run(
        [python, *map(str, words)],
        cwd=SCRIPTS,
        env={**ENVIRONMENT, **environment},
        text=True,
        capture_output=True,
        timeout=120,
    )


def profile(out, script, **environment):
    return run("-m", "memadvisor", "profile", "--out", out, *script, **environment)


@pytest.fixture(scope="module")
def plain():
    return run("ticking.py", "12", "0.03", python=warm_python())


def test_an_error_of_the_disk_in_the_middle_is_one_line(plain, tmp_path):
    """Of os.write itself, from its 15th call to a journal on."""
    hook = os.pathsep.join((str(SCRIPTS / "failing_writes"), str(ROOT)))
    done = profile(tmp_path / "run", ("ticking.py", "12", "0.03"), PYTHONPATH=hook, FAIL_FROM="15")
    warnings = [line for line in done.stderr.splitlines() if "stopped recording" in line]

    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert len(warnings) == 1 and "Input/output error" in warnings[0]
    assert "Traceback" not in done.stderr
    assert load_run(tmp_path / "run").ranks[0].ending is None


def test_a_full_disk_is_one_line(plain, tmp_path):
    """A file may grow to 8 kB and no further: SIGXFSZ, which Python ignores, and EFBIG."""
    command = f"ulimit -f 16; exec {sys.executable} -m memadvisor profile --out {tmp_path / 'run'} ticking.py 12 0.03"
    done = subprocess.run(
        ["sh", "-c", command], cwd=SCRIPTS, env=ENVIRONMENT, text=True, capture_output=True, timeout=120
    )
    warnings = [line for line in done.stderr.splitlines() if "stopped recording" in line]

    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert len(warnings) == 1 and "File too large" in warnings[0]
    assert "Traceback" not in done.stderr


def test_a_disk_that_fills_under_a_plan_ends_no_training(plain, tmp_path):
    """The recorder's hooks go inside the optimizer's step then, where the engine's stand beside them."""
    words = f"run --policy every-layer --out {tmp_path / 'run'} ticking.py 12 0.03"
    command = f"ulimit -f 16; exec {sys.executable} -m memadvisor {words}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=SCRIPTS, env=ENVIRONMENT, text=True, capture_output=True, timeout=120
    )

    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert "stopped recording: OSError: [Errno 27] File too large" in done.stderr
    assert "Traceback" not in done.stderr


def test_after_kills_at_random_moments_a_run_lacks_a_quarter_second_at_most(tmp_path):
    """benchmarks/survival.py does it some hundred times."""
    rng = random.Random(7)
    results = [kill_once(tmp_path, number, rng) for number in (1, 2)]

    for result in results:
        assert result["problems"] == [] and result["in_order"]
        # A step under way when 250 ms have passed is written when it ends.
        assert result["lost_s"] <= 0.25 + result["longest_step_s"]
    assert sum(result["num_recorded"] for result in results) > 0


@pytest.mark.timeout(150)
def test_of_four_ranks_one_dies_one_hangs_and_the_views_name_them(tmp_path):
    out, done = tmp_path / "run", tmp_path / "done"
    done.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [warm_python(), "-m", "memadvisor", "profile", "--out", out, "four_ranks.py", done],
            cwd=SCRIPTS,
            env={
                **ENVIRONMENT, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(4)
    ]  # fmt: skip
    try:
        assert [ranks[number].wait(timeout=120) for number in (0, 1, 3)] == [0, -signal.SIGKILL, 0]
        deadline_s = time.monotonic() + 20
        while not (done / "2").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        next(out.glob("rank3.*")).unlink()  # and of one there is no journal at all
        shown = run("-m", "memadvisor", "show", out).stdout
        told = json.loads(run("-m", "memadvisor", "show", out, "--json").stdout)
        made = run("-m", "memadvisor", "report", out)
    finally:
        for process in ranks:
            process.kill()
            process.wait()

    assert told["missing_ranks"] == [3]
    assert [rank["rank"] for rank in told["unfinished_ranks"]] == [1, 2]
    assert all(rank["num_steps"] == 6 and rank["behind_s"] >= 0 for rank in told["unfinished_ranks"])
    assert [rank["is_alive"] for rank in told["unfinished_ranks"]] == [False, True]
    assert "missing rank 3: no record" in shown
    assert "unfinished rank 1: ended without a word (killed?); 6 steps, last record" in shown
    assert "unfinished rank 2: no ending yet: still at it, or hanging; 6 steps" in shown
    page = (out / "report.html").read_text()
    assert made.returncode == 0
    assert "rank 1: ended without a word (killed?)" in page
    assert "1 of 4 ranks left no readable record: rank 3" in page


@pytest.mark.parametrize("shell", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing_changes_nothing(shell, plain, tmp_path):
    """The exit code was 1 of a script that ended with 0; and where stderr is closed, its number may be a file's."""
    command = (
        f"exec {sys.executable} -m memadvisor profile --out {tmp_path / 'run'} ticking.py 12 0.03 {shell}"
    )
    done = subprocess.run(
        ["sh", "-c", command], cwd=SCRIPTS, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=120
    )
    run = load_run(tmp_path / "run")

    assert (done.returncode, done.stdout) == (plain.returncode, plain.stdout)
    assert (run.problems, run.ranks[0].ending.exit_code) == ((), 0)
    assert (tmp_path / "run" / "report.html").exists()
