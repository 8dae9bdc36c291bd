import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for it is Linux's")

RANK = (
    "import sys; from memadvisor.capture.launch import end_with; end_with(int(sys.argv[1])); print('trains')"
)


def rank_of(launcher, *, before=()):
    return subprocess.run(
        [*before, sys.executable, "-c", RANK, str(launcher)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("is_reaped", [True, False])
def test_a_rank_whose_launcher_is_gone_before_it_asks_ends_at_once(is_reaped):
    """The kernel tells nothing of what was before; a zombie is gone, though its number is there."""
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    if is_reaped:
        launcher.wait()
    else:
        os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)
    ended = rank_of(launcher.pid)
    launcher.wait()

    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "")


def test_an_interpreter_that_is_started_by_another_program_trains():
    """Its parent is that program; the launcher lives."""
    between = ("sh", "-c", '"$@"; exit $?', "sh")

    assert rank_of(os.getpid(), before=between).stdout == "trains\n"
    assert rank_of(os.getpid()).stdout == "trains\n"
