"""Run the script as `python script.py` would: argv, __main__, sys.path, exit code, exceptions, signals."""

from __future__ import annotations

import builtins
import io
import runpy
import stat
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from memadvisor.errors import UsageError
from memadvisor.run.files import may_be_there, working_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A script's file name, or a module's name as for `python -m`; and its own arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def label(self) -> str:
        """A short name for a directory: `train_gpt`."""
        stem = self.name.rpartition(".")[2] if self.is_module else Path(self.name).stem
        return "".join(c if c.isalnum() or c in "-_" else "_" for c in stem) or "script"


def check_target(target: Target) -> None:
    """Raise UsageError for a script that is not there; a missing module is found out by running it."""
    path, here = Path(target.name), working_directory()
    if target.is_module:
        if not _has_finder(target.name.partition(".")[0], here):
            raise UsageError(f"There is no module {target.name!r}.", hint="name it as for `python -m`.")
        return
    if target.name == "-":
        raise UsageError(
            "A script is not read from standard input where `-` stands.",
            hint="name its file; of a pipe that is /dev/stdin.",
        )
    if not may_be_there(path):
        raise UsageError(f"There is no script {target.name!r}.", hint="give the path of the training script.")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode) and not (path / "__main__.py").exists():
            raise UsageError(
                f"{target.name!r} is a directory without __main__.py.",
                hint="give the training script itself.",
            )
        if stat.S_ISREG(mode):  # not of a pipe, which can be read once
            path.open("rb").close()
    except OSError as error:
        raise UsageError(
            f"{target.name!r} cannot be read: {error.strerror}.", hint="check its permissions."
        ) from error


def _has_finder(package: str, here: Path) -> bool:
    """Whether something would import it, as files in the path or otherwise: what pip installs in place has often a finder
    of its own. Nothing is imported."""
    if PathFinder.find_spec(package, [str(here), *sys.path]):
        return True
    others = [finder for finder in sys.meta_path if finder is not PathFinder and hasattr(finder, "find_spec")]
    return any(finder.find_spec(package, None) for finder in others)


def run_target(target: Target) -> None:
    """Run it in this process. Whatever it raises comes out, SystemExit and KeyboardInterrupt included."""
    sys.argv = [target.name, *target.arguments]
    if target.is_module:
        _replace_first_path(str(Path.cwd()))
        _run_module(target.name)
        return
    path = Path(target.name)
    if path.is_file() and not zipfile.is_zipfile(path):
        _replace_first_path(str(path.resolve().parent))
        _run_file(path.absolute())
    else:
        _replace_first_path(str(path.resolve()))
        runpy.run_path(target.name, run_name="__main__")


def _run_module(name: str) -> None:
    """As `python -m`, which ends with one line where there is no such module to run, and code 1."""
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except ImportError as error:
        if not _is_of_runpy_alone(error.__traceback__):
            raise
        raise SystemExit(f"{sys.executable}: {error}") from None


def _is_of_runpy_alone(traceback: TracebackType | None) -> bool:
    """Whether runpy itself raised it, before anything of the module ran: the module may raise ImportErrors of its own."""
    frames = traceback.tb_next if traceback is not None else None
    while frames is not None and _is_launching(frames):
        frames = frames.tb_next
    return frames is None


def _run_file(path: Path) -> None:
    """As runpy.run_path, but __main__ stays (for atexit and pickling) and __file__ is absolute, as in Python."""
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    main.__dict__.update(__file__=str(path), __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    with io.open_code(str(path)) as file:
        code = compile(file.read(), str(path), "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _replace_first_path(directory: str) -> None:
    # Replaced, never removed: a script may rely on its own directory being first.
    if not sys.flags.safe_path:
        sys.path[0] = directory


def hide_our_frames(error: BaseException) -> None:
    """Let Python print the traceback that it would have printed without us."""
    original = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        sys.excepthook = original
        if value is error:
            traceback = _without_passing_frames(_without_leading_frames(traceback))
            value = value.with_traceback(traceback)
        original(kind, value, traceback)

    sys.excepthook = excepthook


def _without_leading_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The part that the script is to blame for: what follows `run_target`, or nothing (a syntax error)."""
    remaining = traceback
    while remaining is not None and remaining.tb_frame.f_code is not run_target.__code__:
        remaining = remaining.tb_next
    remaining = remaining.tb_next if remaining is not None else None
    while remaining is not None and _is_launching(remaining):
        remaining = remaining.tb_next
    return remaining


def _without_passing_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Without our wrappers around calls of torch (of a backward pass), which the exception only passed through."""
    here = Path(__file__).parent
    first = TracebackType(traceback, sys._getframe(), 0, 1) if traceback is not None else None
    before = first
    while before is not None and before.tb_next is not None:
        each = before.tb_next
        if each.tb_next is not None and Path(each.tb_frame.f_code.co_filename).parent == here:
            before.tb_next = each.tb_next
        else:
            before = each
    return first.tb_next if first is not None else None


def _is_launching(traceback: TracebackType) -> bool:
    code = traceback.tb_frame.f_code
    return (
        code in (_run_file.__code__, _run_module.__code__)
        or code.co_filename == "<frozen runpy>"
        or code.co_filename == runpy.__file__
    )


def exit_code_of(error: BaseException | None) -> int:
    """The code that Python will end with."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        code = error.code
        return 0 if code is None else code if isinstance(code, int) else 1
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def split_command(words: Sequence[str]) -> tuple[list[str], Target | None]:
    """Split `profile ...` into our words and the script with its own arguments.

    Our options end at the first word that is neither an option nor an option's value, or at `-m`.
    """
    takes_value = {
        "--nproc",
        "--launcher",
        "-o",
        "--out",
        "--trace-step",
        "--memory-limit",
        "--max-run-size",
        "--plan",
        "--zero",
        "--policy",
        "--param-dtype",
        "--reduce-dtype",
        "--optimizer-dtype",
        "--ranks",
        "--secondary-ranks",
        "--reduce-depth",
        "--gather-bits",
        "--reduce-bits",
        "--all-reduce-bits",
        "--all-reduce-top",
        "--all-reduce-rank",
        "--local-sgd",
        "--offload-optimizer",
        "--offload-parameters",
        "--optimizer-bits",
        "--chunked-loss",
        "--autocast",
        "--offload-activations",
        "--offload-units",
        "--compress-activations",
        "--compress-units",
    }
    position = 1
    while position < len(words):
        word = words[position]
        if word == "-m":
            rest = tuple(words[position + 2 :])
            if position + 1 >= len(words):
                return list(words[:position]), None
            return list(words[:position]), Target(name=words[position + 1], is_module=True, arguments=rest)
        if not word.startswith("-") or word == "-":
            return list(words[:position]), Target(
                name=word, is_module=False, arguments=tuple(words[position + 1 :])
            )
        position += 2 if word in takes_value else 1
    return list(words), None
