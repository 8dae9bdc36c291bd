"""Start several ranks on this machine, as `torchrun --nproc-per-node` would, with signals and exit codes kept.

A launcher that is killed can end nobody, and its ranks would train on without it. On Linux each asks the kernel to be
told (`end_with`). Of the launcher alone: whoever started memadvisor once a rank answers for its own processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

from memadvisor.run.process import is_there

_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def launch_ranks(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `python -m memadvisor ARGUMENTS` once a rank and wait; returns the exit code.

    The code is that of the first rank to fail (128 + N for signal N), whereupon the others are ended:
    they would wait for it in their next collective for ever.
    """
    port = _free_port()
    ranks = [_start_rank(rank, num_ranks, port, arguments) for rank in range(num_ranks)]
    interrupted: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        interrupted.append(number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    previous: dict[signal.Signals, Any] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` is heeded, here and in the ranks
            previous[number] = signal.signal(number, forward)
    # A terminal sends SIGINT to the whole group already; the ranks decide what it means.
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
    try:
        return _wait(ranks)
    finally:
        _end(ranks)
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_with(launcher: int) -> None:
    """Have this process, a rank, get SIGTERM when its launcher is no more, as the launcher would have sent it itself.

    The kernel sends it when the *thread* ends that started the rank: `launch_ranks` needs the main one for its signals.
    It outlives an exec, and processes that the script forks do not inherit it. Elsewhere than on Linux nothing happens.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # a C library without it; forbidden, it returns -1
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # It may have ended before; and an interpreter that is a script may stand between it and this process.
    if os.getppid() != launcher and not is_there(launcher):
        os.kill(os.getpid(), signal.SIGTERM)


def _start_rank(rank: int, num_ranks: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, lest the ranks fight for the cores
    command, *rest = arguments
    ours = [command, "--launcher", str(os.getpid())]
    return subprocess.Popen([sys.executable, "-m", "memadvisor", *ours, *rest], env=environment)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            return failed if failed > 0 else 128 - failed
        if all(code is not None for code in codes):
            return 0
        time.sleep(0.05)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline_s = time.monotonic() + _GRACE_S
    for process in ranks:
        try:
            process.wait(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
