"""Programs of several Gloo ranks, started again where torch itself brings one down at its end.

A Gloo thread that lets go of its last operation while Python is finalized asks for the interpreter's lock, is ended
instead, and takes the process with it (torch 2.13: plain FSDP2 programs of two ranks in one of three ends, plain DDP
ones now and then). With or without memadvisor; nothing that a test of ours is about.
"""

import shutil
import subprocess
from collections.abc import Sequence

ABORTED = "terminate called without an active exception"
TIMES = 5


def completed(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` as text, from the first time that torch did not abort; `--out` is removed in between."""
    for _ in range(TIMES):
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
        if ABORTED not in done.stderr:
            break
        if "--out" in command:
            shutil.rmtree(command[command.index("--out") + 1], ignore_errors=True)
    return done  # type: ignore[no-any-return]
