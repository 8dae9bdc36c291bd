"""Python's warning of a fork is of the script's own threads."""

import subprocess
import sys

import pytest

from tests.warm_python import warm_python

TRAINING = """
import os, threading, torch

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 4):
        fork()
"""
WITH_A_THREAD = """
end = threading.Event()
thread = threading.Thread(target=end.wait)
thread.start()
fork()
end.set()
thread.join()
fork()
"""


def warnings_of(tmp_path, script, *words):
    """How often, and of which line, Python warns of threads."""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [warm_python(), *words, str(path)], capture_output=True, text=True, timeout=300, check=True
    )
    return [line.split(":")[1] for line in done.stderr.splitlines() if "multi-threaded" in line]


def profile(tmp_path):
    return "-m", "memadvisor", "profile", "-o", str(tmp_path / "run")


def run(tmp_path):
    """Its lanes have threads, too, which Python knows of."""
    return "-m", "memadvisor", "run", "-o", str(tmp_path / "planned"), "--offload-optimizer", "disk"


@pytest.mark.parametrize("wrapped", [profile, run])
def test_a_script_of_one_thread_is_not_warned_of_ours(wrapped, tmp_path):
    assert warnings_of(tmp_path, TRAINING) == []
    assert warnings_of(tmp_path, TRAINING, *wrapped(tmp_path)) == []


def test_a_script_is_warned_of_its_own_thread_as_without_us(tmp_path):
    plain = warnings_of(tmp_path, TRAINING + WITH_A_THREAD)

    assert len(plain) == (sys.version_info >= (3, 12))
    assert warnings_of(tmp_path, TRAINING + WITH_A_THREAD, *profile(tmp_path)) == plain
