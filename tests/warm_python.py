"""Python programs of the tests as forks of one interpreter that has imported torch, which takes it seconds.

`warm_python()` is the path of a command that takes the place of `sys.executable`: its arguments, environment, working
directory and open descriptors are the program's, and so are its signals, its exit code and its death. What a program
starts by `sys.executable` is such a fork, too, and so are the processes of multiprocessing, however it starts them.
What only an interpreter of its own can show (that
nothing of ours hangs on what is imported already) is for the tests of tests/cli/test_wrapping.py, test_scripts.py
and tests/samples, which start one.

The command (warm_python_client.py) asks the server, which forks the program, tells the command how it ended, and
ends it if the command is killed. The server is the parent of all: ranks of one launch have the same, as they should.

What would take a program longest is its end: Python takes every module apart, and each page of torch's that it touches
is copied. A fork ends when its threads and its atexit functions have, which is all that a program can see of it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import fcntl
import gc
import importlib
import io
import json
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CLIENT = HERE / "warm_python_client.py"
OURS = (
    "memadvisor.cli.closing",
    "memadvisor.cli.show",
    "memadvisor.cli.advise",
    "memadvisor.report.page",
)
_SERVER = "from tests.warm_python import _serve; _serve()"


@cache
def warm_python() -> str:
    """The command; its server lives as long as this process does."""
    directory = Path(tempfile.mkdtemp(prefix="warm-python-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "socket"))
    listener.listen(64)  # programs may ask while torch is being imported
    command = directory / "python"
    source = CLIENT.read_text()
    command.write_text(source.replace("#!python", f"#!{sys.executable}", 1))
    command.chmod(0o700)
    subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(command), str(listener.fileno())],
        cwd=HERE.parent,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",  # those of a program that wants several are more than the cores
            "PYTHONPATH": str(HERE.parent),
        },
        pass_fds=[listener.fileno()],
        stdin=subprocess.PIPE,  # ends with this process, however that ends
        stdout=subprocess.DEVNULL,
    )
    listener.close()
    return str(command)


def _serve() -> None:
    """Fork for each program, until stdin ends. A fork goes on as the program, and ends as an interpreter does."""
    ending = _Ending()
    # The first to be registered is the last to be called.
    atexit.unregister(multiprocessing.util._exit_function)
    atexit.register(ending.end)
    atexit.register(multiprocessing.util._exit_function)
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    # For the programs: torch, and of ours what knows no torch. What records and what trains are each program's to import.
    for name in OURS:
        importlib.import_module(name)
    # What torch uses only where it is installed is each program's own to find.
    sys.modules.pop("pynvml", None)
    gc.collect()
    gc.freeze()  # else the first collection of each fork would copy every page
    command, listening = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    living: dict[int, tuple[int, socket.socket]] = {}  # by what is ready when the program has ended
    while True:
        clients = [client for _, client in living.values()]
        ready, _, _ = select.select([0, listening, *living, *clients], [], [])
        if 0 in ready:
            shutil.rmtree(Path(command).parent)
            os._exit(0)
        for ended, (program, client) in list(living.items()):
            if ended in ready or client in ready:
                _finish(program, client, is_killed=ended not in ready)
                os.close(ended)
                del living[ended]
        if listening not in ready:
            continue
        client, _ = listening.accept()
        asked, descriptors = _receive(client)
        if asked is None:
            client.close()
            continue
        program = os.fork()
        if program == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        living[os.pidfd_open(program)] = program, client
        _tell(client, program)
    for each in (listening, client, *clients):
        each.close()
    for descriptor in living:
        os.close(descriptor)
    _put_in_place(descriptors, asked["descriptors"])
    _become(asked, command, ending)


class _Ending:
    """The end of a fork whose exit code is known: all but taking Python apart."""

    def __init__(self) -> None:
        self.code: int | None = None

    def end(self) -> None:
        if self.code is None:
            return  # Python ends by a signal, or in a way of its own
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None and not getattr(stream, "closed", False):
                    stream.flush()
        except Exception:
            return  # which Python says, and makes its exit code
        for file in gc.get_objects():
            if issubclass(type(file), io.IOBase):  # one that the program left open
                with contextlib.suppress(Exception):
                    file.flush()
        os._exit(self.code)


def _receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What a command asks for, one line of JSON, and its open descriptors; None of one that is killed."""
    data, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 250)
    while not data.endswith(b"\n"):
        more = client.recv(1 << 16)
        if not more:
            return None, []
        data += more
    return json.loads(data), descriptors


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # that of a command that is killed
        client.sendall(b"%d\n" % number)


def _finish(program: int, client: socket.socket, *, is_killed: bool) -> None:
    """Take the program's end and tell the command, or make one where the command is no more."""
    if is_killed:
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    _tell(client, status)
    client.close()


def _put_in_place(descriptors: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they have in the command, for arguments may speak of them."""
    moved = [
        fcntl.fcntl(descriptor, fcntl.F_DUPFD, 500) for descriptor in descriptors
    ]  # out of each other's way
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(asked: dict[str, Any], command: str, ending: _Ending) -> None:
    """Take over the command's environment, directory and signals, and run the program."""
    import torch

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        heeded = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in asked["ignored"] else heeded)
    paths = [path for path in sys.path if path not in ("", str(HERE.parent))]
    environment = asked["environment"]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(asked["directory"])
    multiprocessing.process.ORIGINAL_DIR = asked["directory"]  # from which spawned processes find the script
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))
    sys.executable = command
    multiprocessing.spawn.set_executable(command)
    found = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    try:
        _run(asked["words"], found + paths)
        ending.code = 0
    except SystemExit as end:
        ending.code = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        ending.code = 1
        raise


def _run(words: list[str], paths: list[str]) -> None:
    """As `python WORDS` does, in the module `__main__` that there is."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # those that there are know of other files
        before = getattr(sys, name)
        stream = open(number, before.mode, encoding=before.encoding, errors=before.errors, closefd=False)  # noqa: SIM115
        unbuffered = name == "stderr" or (name == "stdout" and bool(os.environ.get("PYTHONUNBUFFERED")))
        stream.reconfigure(line_buffering=unbuffered, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    main = sys.modules["__main__"]
    vars(main).clear()
    vars(main).update(__name__="__main__", __builtins__=builtins, __spec__=None, __doc__=None)
    if words[0] == "-m":
        sys.path[:] = [str(Path.cwd()), *paths]
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.path[:] = ["", *paths]
        sys.argv = ["-c", *words[2:]]
        exec(words[1], vars(main))
        return
    sys.path[:] = [str(Path(words[0]).resolve().parent), *paths]
    sys.argv = list(words)
    main.__file__ = os.path.abspath(words[0])  # noqa: PTH100  # which leaves a link's own name
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))
