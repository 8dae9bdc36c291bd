"""Whether the process that wrote a journal still lives: a killed one leaves no ending, and neither does a hanging one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from memadvisor.run.documents import ProcessInfo

_PROC = Path("/proc")


def own_mark() -> str | None:
    """What `ProcessInfo.mark` says of this process; None where the system does not tell (only Linux does)."""
    scope, found = _scope(), _state_and_start(os.getpid())
    return None if scope is None or found is None else f"{scope} {found[1]}"


def lives(process: ProcessInfo) -> bool | None:
    """Whether the process is there now; None where this machine, or this container, cannot know."""
    if process.pid <= 0:
        return None
    if process.mark is None:  # an older run, or another system
        return _exists(process.pid) if process.host == socket.gethostname() else None
    scope, _, start = process.mark.rpartition(" ")
    if scope != _scope():
        return None
    found = _state_and_start(process.pid)
    if found is None:  # gone, or hidden from this user
        return None if _exists(process.pid) else False
    return found[1] == start and found[0] not in "ZX"


def is_there(pid: int) -> bool:
    """Whether a process of this machine has that number now and has not ended; a zombie has."""
    found = _state_and_start(pid)
    return _exists(pid) if found is None else found[0] not in "ZX"


def _scope() -> str | None:
    """Where a process number means one process: this boot of this machine, and this namespace of processes."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except (OSError, ValueError):
        return None


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """The state's letter and the time of its start, in ticks since the boot: fields 3 and 22 of proc_pid_stat(5)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()  # its name, in brackets, may hold anything
        return fields[0], fields[19]
    except (OSError, IndexError):
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
