"""Follow the script into the ranks that it starts by itself, and into its own next life.

A plan follows by the same ways; where it cannot, it is refused before the ranks are started.

Nothing is injected into other processes. Three calls of this process are watched, and only what runs the
very same script goes on being recorded: ranks of `torch.multiprocessing.spawn`, a command that runs the
script again as another rank (Lightning's launcher), and a script that executes itself anew.
"""

from __future__ import annotations

import functools
import os
import resource
import shlex
import site
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from memadvisor.capture.script import Target
from memadvisor.errors import PlanError

Recording = Callable[[int], AbstractContextManager[None]]  # of the process that was started as the n-th

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_TAKE_A_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_IS_THERE = "import importlib.util, sys; sys.exit(importlib.util.find_spec('memadvisor') is None)"


_ROOT = Path(__file__).resolve().parents[2]  # of a checkout
_WORTH_SAYING_S = 1.0


@dataclass(frozen=True, slots=True)
class Continuation:
    """How this profile is continued in another process: the words after `python -m memadvisor`.

    `num_ranks`: that of the plan that goes along, if any.
    """

    target: Target
    script: Path | None  # resolved before the script may change the working directory; None of a module
    words: tuple[str, ...]
    num_ranks: int | None = None

    def command(self, command: Sequence[str], *options: str, cwd: str | None = None) -> list[str] | None:
        """The command that runs the same script profiled; None where it is not this script's."""
        position = _end_of_flags(command)
        if position >= len(command) or not _is_this_python(command[0]):
            return None
        if not self._is_same(command[position:], cwd or "."):
            return None
        return [
            *command[:position],
            *("-m", "memadvisor", self.words[0], *options, *self.words[1:]),
            *command[position:],
        ]

    def check_ranks(self, num_ranks: int) -> None:
        """Raise PlanError before ranks are started that are not those of the plan."""
        if self.num_ranks not in (None, num_ranks):
            raise PlanError(
                f"The plan is for {self.num_ranks} rank{'s' if self.num_ranks != 1 else ''}, and the script starts {num_ranks} by itself.",
                hint=f"make a plan for them with `memadvisor advise --gpus {num_ranks}`.",
            )

    def check_launcher(self, command: Sequence[str]) -> None:
        """Raise PlanError before a launcher is started whose ranks the plan would not reach."""
        if self.num_ranks is not None and _is_launcher(command):
            raise PlanError(
                f"The script starts its ranks by `{' '.join(command)[:100]}`, and the plan does not reach them.",
                hint=f"run what it launches by `memadvisor run --nproc {self.num_ranks}`, or by torchrun.",
            )

    def _is_same(self, words: Sequence[str], cwd: str) -> bool:
        if words[0] == "-m":
            return self.target.is_module and words[1:2] == [self.target.name]
        path = (Path(cwd) / words[0]).resolve()
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        if self.target.is_module and main is not None:
            return path == Path(main).resolve()
        return path == self.script


def _end_of_flags(command: Sequence[str]) -> int:
    """The index of the script, or of `-m`, behind Python's own options."""
    position = 1
    while position < len(command) and command[position].startswith("-") and command[position] != "-m":
        if command[position] in ("-", "-c") or command[position].startswith("-m"):
            return len(command)
        position += 2 if command[position] in _TAKE_A_VALUE else 1
    return position


def _is_this_python(path: str) -> bool:
    return bool(sys.executable) and Path(path).resolve() == Path(sys.executable).resolve()


def _words_of(args: Any) -> list[str]:
    """A command's words, also of one for the shell; none of what is no command."""
    try:
        return shlex.split(args) if isinstance(args, str) else [os.fsdecode(word) for word in args]
    except (TypeError, ValueError):
        return []


def _is_launcher(words: Sequence[str]) -> bool:
    """Whether a command starts ranks: `torchrun`, `accelerate launch`, or Python with one of their modules."""
    names = [Path(word).name for word in words]
    return (
        "torchrun" in names[:1]
        or names[:2] == ["accelerate", "launch"]
        or any(option == "-m" and module in _LAUNCHERS for option, module in pairwise(words))
    )


def _finds_memadvisor(command: Sequence[str], environment: Mapping[str, str] | None, cwd: str | None) -> bool:
    """Whether Python, started like this, would find us; else the script's child would not even start."""
    flags = command[1 : _end_of_flags(command)]
    check = [command[0], *flags, "-c", _IS_THERE]
    return subprocess.run(check, env=environment, cwd=cwd, stdin=subprocess.DEVNULL).returncode == 0


class Followed:
    """The calls that start a rank or a next life, watched from construction to `stop`.

    `before_exec` is told what replaces this process, and whether that is the script itself.
    """

    def __init__(
        self, continuation: Continuation, before_exec: Callable[[Sequence[str], bool], None]
    ) -> None:
        self._continuation = continuation
        self._before_exec = before_exec
        self._pid = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._replace(subprocess.Popen, "__init__", self._popen(subprocess.Popen.__init__))
        self._replace(os, "execv", self._exec(os.execv))
        self._replace(os, "execve", self._exec(os.execve))

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def follow_spawn(self, record: Recording) -> None:
        """Once torch is there: ranks of torch.multiprocessing's `spawn`, each under `record`, which can be pickled."""
        self._replace(sys.modules["torch.multiprocessing.spawn"], "_wrap", SpawnedRank(record))

    def _popen(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(popen: Any, args: Any, *rest: Any, **options: Any) -> None:
            command = None if rest else self._rank_command(args, options)
            original(popen, command or args, *rest, **options)
            if command is not None:
                popen.args = args

        return init

    def _rank_command(self, args: Any, options: Mapping[str, Any]) -> list[str] | None:
        environment, cwd = options.get("env"), options.get("cwd")
        self._continuation.check_launcher(_words_of(args))
        if not isinstance(args, (list, tuple)) or options.get("shell") or options.get("executable"):
            return None
        if not _is_another_rank(os.environ if environment is None else environment):
            return None
        try:
            words = [os.fsdecode(word) for word in args]
            command = self._continuation.command(words, "--joined", cwd=cwd)
            if command is None or not _finds_memadvisor(words, environment, cwd):
                return None
        except (TypeError, ValueError, OSError):
            return None  # an argument that is none: the script's own call will say so
        self._continuation.check_ranks(
            int((os.environ if environment is None else environment)["WORLD_SIZE"])
        )
        return command

    def _exec(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def execute(path: Any, args: Any, *environment: Any) -> Any:
            if os.getpid() == self._pid:
                args = self._next_life(path, args, *environment)
            return original(path, args, *environment)

        return execute

    def _next_life(self, path: Any, args: Any, environment: Mapping[str, str] | None = None) -> Any:
        try:
            words = [os.fsdecode(word) for word in args]
            command = self._continuation.command([os.fsdecode(path), *words[1:]], "--again")
            if command is not None and not _finds_memadvisor(command, environment, None):
                command = None
        except (TypeError, ValueError, OSError):
            return args
        self._before_exec(words, command is not None)
        return args if command is None else [words[0], *command[1:]]

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)

        def undo() -> None:
            if getattr(owner, name) is value:  # somebody else's wrapper around ours stays
                setattr(owner, name, original)

        self._undo.append(undo)


def _is_another_rank(environment: Mapping[str, str]) -> bool:
    """Whether the variables name a rank of several that is not this process."""
    if not environment.get("WORLD_SIZE", "").isdecimal() or int(environment["WORLD_SIZE"]) < 2:
        return False
    names = ("RANK", "LOCAL_RANK", "NODE_RANK")
    return any(environment.get(name, "0") != os.environ.get(name, "0") for name in names)


class _Made:
    """Stands for what is made of a function and its arguments where it is unpickled."""

    def __init__(self, how: tuple[Any, ...]) -> None:
        self._how = how

    def __reduce__(self) -> tuple[Any, ...]:
        return self._how


class SpawnedRank:
    """Stands in for torch.multiprocessing's `_wrap`, the function that its processes run first.

    It records the process, and calls `_wrap`, which handles the function's exceptions as ever: their
    tracebacks begin there, below any frame of ours.
    """

    def __init__(self, record: Recording) -> None:
        self._record = record
        self._original = sys.modules["torch.multiprocessing.spawn"]._wrap

    def __reduce__(self) -> tuple[Any, ...]:
        plain = SpawnedRank, (self._record,)
        if PathFinder.find_spec("memadvisor") is not None:
            return plain
        # Of a checkout that is not installed the script's directory has taken the place on the path, and the new process
        # looks where this one does: what is first in the tuple is made first, and has it look in the checkout, too.
        return itemgetter(1), ((_Made((site.addsitedir, (str(_ROOT),))), _Made(plain)),)

    def __call__(self, fn: Any, index: int, args: Any, error_file: str) -> None:
        with self._record(index):
            self._original(fn, index, args, error_file)


def of_other_processes() -> str:
    """What processes that the script started took, and what to do then; "" where that is nothing to speak of."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = used.ru_utime + used.ru_stime
    if used_s < _WORTH_SAYING_S:
        return ""
    return (
        f"processes that it started took {used_s:.0f} s of processor time, unrecorded. If it launches the training, "
        "let it launch this: LAUNCHER ... -m memadvisor profile SCRIPT"
    )
