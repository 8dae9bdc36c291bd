"""The command `memadvisor`: finds the command's file, and turns every user error into one line and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise, takewhile
from types import FrameType
from typing import Any

from memadvisor import __version__
from memadvisor.capture.script import Target, split_command
from memadvisor.cli.patient_output import patient_stdout
from memadvisor.errors import MemadvisorError
from memadvisor.report.escape import visible

# One file a command: memadvisor/cli/<name>.py with configure(parser) and run(arguments) -> exit code.
COMMANDS = {
    "profile": "run a script unchanged and record its memory and time",
    "show": "print what a run recorded",
    "report": "write a run as one offline HTML file",
    "tui": "look at a run in the terminal, finished or growing",
    "advise": "rank plans that fit a memory budget",
    "estimate": "predict memory and step time of a training layout without running it",
    "diff": "print what changed from one run to another",
    "check": "hold a run against limits: exit code 1 where one is broken",
    "run": "apply a plan to an unchanged script, and compare prediction with measurement",
    "export": "write a plan as the configuration of DeepSpeed, Accelerate, FSDP2, torchtitan or Megatron",
    "calibrate": "measure this machine's arithmetic and collectives",
    "doctor": "try whether memadvisor works on this machine, and say what stands in its way",
}


_BEGINNING = """\
begin with a script as it stands:
  memadvisor profile train.py                        record it, write a report
  memadvisor advise RUN --memory 24GiB -o plan.json  what to change, and why
  memadvisor run --plan plan.json train.py           change it; was that true?

`memadvisor COMMAND --help` lists a command's options.
"""
_NO_VALUE = re.compile(r"(--?[A-Za-z][\w-]*)=--")


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._words: list[str] = []
        # argparse's own words are Python's: "invalid int value".
        self.register("type", int, _whole)
        self.register("type", float, _number)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> None:  # type: ignore[override]
        message = self._of_a_negative(message) or message
        hint = "" if " Hint: " in message else f". Hint: `{self.prog} --help` lists the options."
        print(f"{self.prog}: {message}{hint}", file=sys.stderr)
        raise SystemExit(2)

    def _of_a_negative(self, message: str) -> str | None:
        """argparse takes `-5GiB` for an option, and says that nothing follows the one before it."""
        names = message.removeprefix("argument ").removesuffix(": expected one argument")
        for name, value in pairwise(self._words if "expected one argument" in message else ()):
            if name in names.split("/") and re.match(r"-[\d.]", value):
                return f"argument {names}: {value!r} is negative"
        return None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user's mistake is one line on stderr and code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog="memadvisor",
        description="Where memory and time of a PyTorch training go, and what to change",
        epilog=_BEGINNING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"memadvisor {__version__}")
    target: Target | None = None
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        if words[:1] == [name]:  # only the chosen command's file, and what it needs, is imported
            chosen = import_module(f"memadvisor.cli.{name}")
            chosen.configure(command)
            if getattr(chosen, "TAKES_SCRIPT", False):
                words, target = split_command(words)
    for word in takewhile(lambda each: each != "--", words):
        if found := _NO_VALUE.fullmatch(word):  # of which older Pythons' argparse makes an empty list
            commands.choices.get(words[0], parser).error(f"argument {found[1]}: expected one argument")
    arguments, strange = parser.parse_known_args(words, argparse.Namespace(target=target))
    if strange:  # argparse would have `memadvisor --help` list the options, which has none of the command's
        commands.choices.get(arguments.command, parser).error(
            f"unrecognized arguments: {visible(' '.join(strange))}"
        )
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return _run(arguments)
    except MemadvisorError as error:
        print(f"memadvisor {arguments.command}: {error.one_line()}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace) -> int:
    """The command's exit code, whoever reads what it prints."""
    command = import_module(f"memadvisor.cli.{arguments.command}")
    code: int
    if getattr(command, "TAKES_SCRIPT", False):  # stdout and Ctrl-C are the script's
        code = command.run(arguments)
        return code
    try:
        with _signals_unwind(), patient_stdout():
            code = command.run(arguments)
    except KeyboardInterrupt:
        return 130  # as shells count it: a traceback of ours would tell nobody anything
    return code


@contextlib.contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM and a closed terminal end a command as Ctrl-C does, through what takes its processes and temporary files away."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    # `nohup` is heeded.
    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
