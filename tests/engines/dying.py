"""Trainings of several ranks in which one dies or hangs, for test_dying.py.

    python -m tests.engines.dying FOLDER

plays all CASES and leaves each rank's error stream in FOLDER. torch is imported once, here, and each rank is a
fork that ends as an interpreter does, so that a case costs little more than its training.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # what every rank's optimizer would import by itself
import torch.distributed as dist

from memadvisor.engines.apply import install
from tests.engines.trainings import Training, build, make_optimizer, make_plan

GROUP_TIMEOUT_S = 5.0
# What a rank may need beside one timeout, on a machine that others use: starting, and an exit that waits for nobody.
LIMIT_S = GROUP_TIMEOUT_S + 40.0
FATAL_STEP = 2


@dataclass(frozen=True, slots=True)
class Case:
    """`victim` stops being there `how` in the third step, in the forward or the backward of blocks.1."""

    stage: int
    overlap: bool
    how: str
    where: str
    num_ranks: int = 2
    victim: int = 1

    @property
    def name(self) -> str:
        lanes = "overlapped" if self.overlap else "waiting"
        return f"{self.stage}-{lanes}-{self.how}-{self.where}-{self.victim}of{self.num_ranks}"


CASES = (
    Case(1, False, "exit", "backward"),
    Case(1, False, "hang", "backward"),
    Case(2, False, "kill", "backward", num_ranks=3, victim=2),
    Case(2, True, "hang", "backward"),
    Case(3, False, "exit", "forward", num_ranks=3, victim=1),
    Case(3, True, "hang", "forward"),
    Case(3, True, "kill", "backward", victim=0),  # with it goes the store
    Case(3, True, "stop", "forward", victim=0),  # the store does not answer any more
)


def stop_being_there(how: str) -> None:
    if how == "exit":
        os._exit(9)
    elif how == "hang":
        time.sleep(1000)
    else:
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def start_no_threads() -> None:
    """What Python 3.12.0 to 3.12.2 refuse once a script has ended (python/cpython#113964), refused by each version."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading.Thread.start = start  # type: ignore[method-assign]


def train(case: Case, rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        os.write(1, f"{store.port}\n".encode())
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", rank=rank, world_size=case.num_ranks, store=store, timeout=timeout)
    install(make_plan(case.num_ranks, case.stage, overlap=case.overlap, gather_depth=int(case.overlap)))
    ddp = build(Training(), rank)
    optimizer = make_optimizer("adamw", ddp)
    fatal = False

    def forward(module, args, output):
        if fatal and case.where == "forward":
            stop_being_there(case.how)
        elif fatal:
            output.register_hook(lambda gradient: stop_being_there(case.how))

    ddp.module.blocks[1].register_forward_hook(forward)
    for step in range(FATAL_STEP + 2):
        if step == 1:
            atexit.register(start_no_threads)  # before what the plan, applied by now, does at the end
        fatal = step == FATAL_STEP and rank == case.victim
        ddp(torch.randint(0, 13, (4, 6))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def start(case: Case, rank: int, port: int, folder: Path) -> tuple[int, int]:
    """A forked rank; gives its process and, of rank 0, where its store listens."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writing, 1)
        os.dup2(os.open(folder / f"{case.name}.{rank}", os.O_CREAT | os.O_WRONLY), 2)
        train(case, rank, port)
        sys.exit(0)  # as a script ends; what it raises goes the way of a script's, too
    os.close(writing)
    with os.fdopen(reading) as told:
        return pid, port if rank else int(told.readline())


def play(cases: list[Case], folder: Path) -> dict[str, dict[int, int | None]]:
    """Exit codes by case and rank; None is a rank that is left after the limit, or the victim that hangs."""
    living: dict[int, tuple[Case, int]] = {}
    for case in cases:
        port = 0
        for rank in range(case.num_ranks):
            pid, port = start(case, rank, port, folder)
            living[pid] = (case, rank)
    codes: dict[str, dict[int, int | None]] = {
        case.name: dict.fromkeys(range(case.num_ranks)) for case in cases
    }
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s and any(rank != case.victim for case, rank in living.values()):
        for pid in list(living):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                case, rank = living.pop(pid)
                codes[case.name][rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    codes: dict[str, dict[int, int | None]] = {}
    for first in range(0, len(CASES), 4):  # not all at once: a rank that is slow is not one that hangs
        codes |= play(list(CASES[first : first + 4]), folder)
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
