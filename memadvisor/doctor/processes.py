"""This Python with other arguments, in a process that cannot take the doctor down with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from memadvisor.doctor.facts import TIME_LIMIT_S

# Variables by which a launcher tells a process that it is a rank: what is started here is none of that launch.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_python(arguments: Sequence[str]) -> tuple[int | None, str, str]:
    """Exit code (None at the time limit), stdout and stderr of this Python with these arguments."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        return None, "", _text(expired.stderr)
    return done.returncode, done.stdout, done.stderr


def _text(output: bytes | str | None) -> str:
    return output.decode("utf-8", "replace") if isinstance(output, bytes) else output or ""


def last_words(errors: str) -> str:
    return next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
