"""`memadvisor run --nproc N` on a script that knows nothing of ranks."""

import subprocess

import pytest
import torch

from memadvisor.run.store import load_run
from tests.cli.test_wrapping import ENVIRONMENT, SCRIPTS
from tests.torch_exit import completed
from tests.warm_python import warm_python


@pytest.mark.timeout(180)
def test_a_script_of_one_process_learns_on_two_ranks_what_it_learns_from_batches_twice_as_large(tmp_path):
    words = [warm_python(), str(SCRIPTS / "alone.py")]
    plain = subprocess.run(
        [*words, "8", "0", str(tmp_path / "plain.pt")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    command = [warm_python(), "-m", "memadvisor", "run", "--zero", "3", "--nproc", "2"]
    command += ["--out", str(tmp_path / "run"), words[1], "4", "1", str(tmp_path / "ours.pt")]
    ours = completed(command, env=ENVIRONMENT, timeout=150)
    assert ours.returncode == 0, ours.stderr
    assert "dealt to 2 ranks" in ours.stderr and "trained data-parallel on 2 ranks" in ours.stderr
    # Every rank runs the whole script, and says what it says.
    assert [float(line) for line in ours.stdout.split()] == pytest.approx([float(plain.stdout)] * 2, rel=1e-5)
    torch.testing.assert_close(
        torch.load(tmp_path / "ours.pt"), torch.load(tmp_path / "plain.pt"), rtol=1e-4, atol=1e-6
    )
    run = load_run(tmp_path / "run")
    assert [len(rank.steps) for rank in run.ranks] == [8, 8]


@pytest.mark.timeout(120)
def test_data_that_cannot_be_dealt_is_refused_in_one_line(tmp_path):
    command = [warm_python(), "-m", "memadvisor", "run", "--zero", "1", "--nproc", "2"]
    done = completed(
        [*command, "--out", str(tmp_path / "run"), str(SCRIPTS / "tiny.py"), "none"],
        env=ENVIRONMENT,
        timeout=100,
    )
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "error" in line or "run:" in line] == [
        line for line in done.stderr.splitlines() if "not read its data from a torch DataLoader" in line
    ]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
