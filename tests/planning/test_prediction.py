"""The loop closed on a real script: predicted from the plain run, then applied and measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.run.store import load_run
from memadvisor.schedule import write_schedule
from tests.cost.test_simulate import TIMES

ROOT = Path(__file__).parents[2]
SIZE = ["--layers", "3", "--dim", "64", "--heads", "4", "--seq", "64", "--micro-batch", "2"]
SIZE += ["--accum", "2", "--bf16", "--steps", "4"]


def memadvisor(command, directory, *options):
    words = [command, *options, "--nproc", "2", "--out", str(directory), "samples/train_gpt.py", *SIZE]
    done = subprocess.run(
        [sys.executable, "-m", "memadvisor", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return load_run(directory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return captured_step(memadvisor("profile", tmp_path_factory.mktemp("plain") / "run"))


@pytest.mark.parametrize(
    "options",
    [("--zero", "0"), ("--zero", "2", "--policy", "sqrt"), ("--zero", "3", "--policy", "every-layer")],
)
def test_what_the_engine_holds_is_what_the_simulator_said(plain, tmp_path, options):
    """To the byte, but for the 4-byte stand-ins of released parameters in stage 3."""
    applied = memadvisor("run", tmp_path / "run", *options)
    predicted = simulate(plain, write_schedule(applied.plan, plain.units), TIMES).peak.total_bytes

    for rank in applied.ranks:
        assert predicted == pytest.approx(rank.traced_step.peak_allocated_bytes, rel=1e-3)
