"""The run directory: `manifest.json`, one `rank<N>.pid<P>.journal` a process, `plan.json` where one was applied."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import stat
import time
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from memadvisor.errors import MemadvisorError, PlanError, RunFormatError, UsageError
from memadvisor.plan import Plan
from memadvisor.plan_file import load_plan
from memadvisor.run.documents import Ending, Note, ProcessInfo
from memadvisor.run.files import may_be_there, write_private_file
from memadvisor.run.frames import LARGEST_FRACTION, LARGEST_WHOLE, MAJOR, MINOR
from memadvisor.run.journal import JournalContents, read_journal
from memadvisor.run.process import lives
from memadvisor.run.run import UNKNOWN, Manifest, RankRun, Run

RUNS = Path("memadvisor-runs")  # where runs go by default, in the working directory
_JOURNAL = re.compile(r"rank(\d+)\.pid(\d+)\.journal")
_MAX_JOURNAL_BYTES = 4 * 2**30
_MAX_MANIFEST_BYTES = 16 * 2**20
_MOST_RANKS = 1_000_000
_T = TypeVar("_T")


def journal_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.pid{os.getpid()}.journal"


def unused_run_directory(label: str) -> Path:
    """A name under RUNS that is not taken yet: two runs may start within one second."""
    base = RUNS / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def create_run_directory(directory: Path, argument: str = "--out") -> None:
    """Make the directory, or raise UsageError in one line. An existing run is never written into.

    `argument`: what the caller names it by.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"{argument} {str(directory)!r} cannot be made: {error.strerror}.",
            hint="name a writable directory.",
        ) from error
    if any(directory.iterdir()):
        raise UsageError(f"{argument} {str(directory)!r} is not empty.", hint="name a new directory.")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"{argument} {str(directory)!r} is not writable.", hint="name a writable directory.")


def join_run_directory(directory: Path, launch: str, argument: str = "--out") -> None:
    """As `create_run_directory`, for ranks that are started together: the first to come makes it.

    `launch` tells one launch from the next, so that no rank writes into an older run.
    """
    marker = directory / ".launch"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Another rank may be writing the marker just now, under the names of write_private_file's.
        names = (marker.name, f".{marker.name}.")
        if all(path.name.startswith(names) for path in directory.iterdir()):
            write_private_file(marker, launch, replace=False)
        if marker.exists() and marker.read_text(encoding="utf-8") == launch:
            return
    except (OSError, ValueError) as error:
        detail = error.strerror if isinstance(error, OSError) else "it is damaged"
        raise UsageError(
            f"{argument} {str(directory)!r} cannot be used: {detail}.", hint="name a writable directory."
        ) from error
    raise UsageError(f"{argument} {str(directory)!r} is not empty.", hint="name a new directory.")


def write_manifest(directory: Path, manifest: Manifest) -> bool:
    """Write the manifest unless another process already has, another rank the same: whether it is this one's."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1)
    return write_private_file(directory / "manifest.json", text, replace=False)


def discard_empty_run(directory: Path) -> None:
    """Remove a run directory that no rank has written a journal into, and RUNS if that is empty then; another's files are
    left alone."""
    try:
        if any(_JOURNAL.fullmatch(path.name) for path in directory.iterdir()):
            return
    except (FileNotFoundError, NotADirectoryError):  # another rank has removed it, perhaps just now
        return
    for name in ("manifest.json", "plan.json", ".launch", ".refused"):
        (directory / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it
        directory.rmdir()
        if directory.parent.name == RUNS.name:
            directory.parent.rmdir()


def write_refusal(directory: Path, line: str) -> None:
    """Why a rank that the script itself has started cannot follow the plan, for the process that started it."""
    with contextlib.suppress(OSError):
        write_private_file(directory / ".refused", line, replace=False)


def read_refusal(directory: Path) -> str | None:
    """The first refusal; None where there is none."""
    try:
        return (directory / ".refused").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def journals_of(directory: Path) -> list[Path]:
    """The journals that processes have written into a run, by name."""
    return sorted(path for path in directory.iterdir() if _JOURNAL.fullmatch(path.name) and path.is_file())


def discard_run(directory: Path) -> None:
    """Remove the journals of a run whose plan was refused, and the directory with them."""
    with contextlib.suppress(FileNotFoundError):  # another rank has removed it
        for path in journals_of(directory):
            path.unlink(missing_ok=True)
    discard_empty_run(directory)


def check_run_directory(directory: Path) -> None:
    """Raise RunFormatError where it plainly is no run: nothing, a file, or in a folder that may not be looked into."""
    try:
        what = "" if stat.S_ISDIR(directory.stat().st_mode) else "is not a directory"
    except (FileNotFoundError, NotADirectoryError):
        what = "does not exist"
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL, too
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if what:
        raise RunFormatError(
            f"{str(directory)!r} {what}.", hint="name the directory that `memadvisor profile` wrote."
        )


def load_run(path: str | Path) -> Run:
    """Read a run directory, whatever of it is whole; also while it is being written.

    Raises RunFormatError when the directory is no run, or no rank of it can be read at all.
    """
    directory = Path(path)
    check_run_directory(directory)
    try:
        journals = journals_of(directory)
    except OSError as error:
        raise RunFormatError(
            f"{str(path)!r} cannot be read: {error.strerror}.", hint="check its permissions."
        ) from error
    if not journals and not may_be_there(directory / "manifest.json"):
        raise RunFormatError(
            f"{str(path)!r} is not a run: it holds no manifest.json and no journal.",
            hint="name the directory that `memadvisor profile` wrote.",
        )
    problems: list[str] = []
    ranks: dict[int, RankRun] = {}
    for journal in journals:
        rank = _load_rank(journal, problems)
        if rank is not None:
            known = ranks.get(rank.process.rank)
            if known is not None and _has_trained(known) and _has_trained(rank):
                problems.append(
                    f"rank {rank.process.rank} has two journals; the one with more steps is shown"
                )
            if known is None or _extent(rank) >= _extent(known):
                ranks[rank.process.rank] = rank
    if not ranks:
        detail = "; ".join(problems[:1]) or "no rank has written anything yet"
        raise RunFormatError(
            f"{str(path)!r} has no readable rank: {detail}.", hint="profile the script again."
        )
    manifest = _load_manifest(directory, tuple(ranks.values()), problems)
    plan = _load_plan(directory, problems)
    # A script may start further ranks by itself, which nobody recorded: the process group knows of them.
    world_size = max(
        manifest.world_size, 1 + max(ranks), *(rank.process.world_size for rank in ranks.values())
    )
    return Run(
        path=directory,
        manifest=dataclasses.replace(manifest, world_size=world_size),
        ranks=tuple(ranks[number] for number in sorted(ranks)),
        missing_ranks=tuple(sorted(set(range(min(world_size, _MOST_RANKS))) - set(ranks))),
        problems=tuple(problems),
        plan=plan,
    )


def _has_trained(rank: RankRun) -> bool:
    """Not a process that only started others: those have the same ranks as it."""
    return bool(rank.steps or rank.modules)


def _extent(rank: RankRun) -> tuple[bool, int]:
    return _has_trained(rank), len(rank.steps)


def _load_rank(journal: Path, problems: list[str]) -> RankRun | None:
    try:
        if journal.stat().st_size > _MAX_JOURNAL_BYTES:
            problems.append(f"{journal.name}: larger than 4 GiB; not read")
            return None
        contents = read_journal(journal)
    except OSError as error:
        problems.append(f"{journal.name}: {error.strerror}")
        return None
    problems += contents.problems
    process = _last_document(contents, "process", ProcessInfo, problems, journal.name)
    if process is not None and not 0 <= process.rank < _MOST_RANKS:
        problems.append(f"{journal.name}: there is no rank {process.rank}")
        return None
    if process is None:
        problems.append(f"{journal.name}: the frame that says who wrote it is missing")
        return None
    ending = _last_document(contents, "ending", Ending, problems, journal.name)
    notes = tuple(
        note
        for name, value in contents.documents
        if name == "note" and (note := _document(Note, value, problems, journal.name)) is not None
    )
    tables: dict[str, Any] = {name: tuple(rows) for name, rows in contents.rows.items()}
    is_alive = lives(process) if ending is None else None
    return RankRun(process=process, notes=notes, ending=ending, is_alive=is_alive, **tables)


def _last_document(
    contents: JournalContents, name: str, kind: type[_T], problems: list[str], file: str
) -> _T | None:
    values = [value for found, value in contents.documents if found == name]
    return _document(kind, values[-1], problems, file) if values else None


def _document(kind: type[_T], value: Any, problems: list[str], file: str) -> _T | None:
    """A dataclass made of a JSON object; None, and a problem, where a field is missing or of a wrong type."""
    try:
        hints = typing.get_type_hints(kind)
        return kind(**{name: _checked(value.get(name), hint) for name, hint in hints.items()})
    except (TypeError, AttributeError, ValueError, OverflowError):
        problems.append(f"{file}: a {kind.__name__} makes no sense; it is left out")
        return None


def _checked(value: Any, hint: Any) -> Any:
    """`value` if it is what a field of this type may hold. Raises TypeError or ValueError."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= LARGEST_FRACTION:  # also where it is NaN
            raise ValueError("no number of a training")
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{type(value).__name__} stands where {hint.__name__} belongs")
    if hint is int and abs(value) > LARGEST_WHOLE:
        raise ValueError("no number of a training")
    return value


def _load_manifest(directory: Path, ranks: tuple[RankRun, ...], problems: list[str]) -> Manifest:
    try:
        manifest = _read_manifest(directory / "manifest.json")
    except (OSError, ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        problems.append("manifest.json is missing or damaged; what it held is taken from the journals")
        world_size = max(rank.process.world_size for rank in ranks)
        start = min(rank.process.start_s + rank.process.unix_offset_s for rank in ranks)
        return Manifest(
            format=(MAJOR, MINOR),
            memadvisor_version=UNKNOWN,
            created_unix_s=start,
            world_size=world_size,
            script=UNKNOWN,
            arguments=(),
        )
    if manifest.format[0] > MAJOR:
        raise RunFormatError(
            f"{str(directory)!r} was written in format {manifest.format[0]}, and this version reads {MAJOR}.",
            hint="upgrade memadvisor.",
        )
    return manifest


def _read_manifest(path: Path) -> Manifest:
    if not path.is_file() or path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ValueError("no manifest: too large, or a pipe that would be waited for")
    value = json.loads(path.read_text(encoding="utf-8"))
    return Manifest(
        format=(_checked(value["format"][0], int), _checked(value["format"][1], int)),
        memadvisor_version=_checked(value["memadvisor_version"], str),
        created_unix_s=_checked(value["created_unix_s"], float),
        world_size=_checked(value["world_size"], int),
        script=_checked(value["script"], str),
        arguments=tuple(_checked(argument, str) for argument in value["arguments"]),
    )


def _load_plan(directory: Path, problems: list[str]) -> Plan | None:
    path = directory / "plan.json"
    if not may_be_there(path):
        return None
    if path.is_fifo():  # nothing that a run holds may make its reader wait
        problems.append("plan.json: it is no regular file")
        return None
    try:
        return load_plan(path)
    except (PlanError, MemadvisorError) as error:
        problems.append(f"plan.json: {error}")
        return None
