"""What the run directory says now: read again whenever one of its files has changed.

Everything here runs in a worker thread; a `Snapshot` is handed to the screen whole, so that no view
ever sees half of an update.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from memadvisor.analyzers.analysis import Analysis, analyze
from memadvisor.errors import RunFormatError
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.load import named_hardware
from memadvisor.run.journal import read_journal
from memadvisor.run.process import lives
from memadvisor.run.run import Run
from memadvisor.run.store import load_run

POLL_S = 0.5
# A recorder says what its process is soon after it has made its journal: where nothing has come for so long, nothing will.
_LONGEST_WAIT_S = 60.0

# Name, size and time of change of every file of a run; None: the directory is not there.
Fingerprint = frozenset[tuple[str, int, int]] | None


class State(StrEnum):
    """How a run stands. `silent`: nothing says that it ended, and nothing shows that its process lives.

    `stopped`: the recorder gave up, and whether the script goes on is not in the record.
    """

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"
    SILENT = "silent"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that was readable at one moment. `run` None: nothing yet, and `message` says why."""

    run: Run | None
    analysis: Analysis | None
    state: State
    message: str
    error: RunFormatError | None = None


def fingerprint(directory: Path) -> Fingerprint:
    """What changes when somebody writes into the run; reads no file."""
    try:
        with os.scandir(directory) as entries:
            found = []
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                status = entry.stat()
                found.append((entry.name, status.st_size, status.st_mtime_ns))
    except FileNotFoundError:
        # The directory is gone, or a file of it went between the listing and the look at it.
        return None if not directory.is_dir() else frozenset()
    except OSError:
        return None
    return frozenset(found)


def read_snapshot(directory: Path, hardware: Hardware | None = None) -> Snapshot:
    """Read and analyze the whole run as it is now; a run that cannot be read becomes the message.

    Without `hardware`, utilization stands on the data sheet of the device that the run names, if it is known.
    """
    try:
        run = load_run(directory)
    except RunFormatError as error:
        if awaits_first_flush(directory):
            return Snapshot(
                run=None, analysis=None, state=State.WAITING, message="waiting for the first flush"
            )
        return Snapshot(run=None, analysis=None, state=State.WAITING, message=error.one_line(), error=error)
    state, message = run_state(run)
    hardware = hardware or named_hardware(run.ranks[0].process.device_name)
    return Snapshot(run=run, analysis=analyze(run, hardware), state=state, message=message)


def awaits_first_flush(directory: Path) -> bool:
    """A run has just been begun here, and what its ranks have written so far is whole, but says nothing yet."""
    try:
        journals, manifest = list(directory.glob("rank*.journal")), directory / "manifest.json"
        written = [*journals, *([manifest] if manifest.exists() else [])]
        if not written or time.time() - max(map(os.path.getmtime, written)) > _LONGEST_WAIT_S:
            return False
        contents = [read_journal(journal) for journal in journals]
    except OSError:
        return False
    return all(not read.problems and not _names_its_process(read.documents) for read in contents)


def _names_its_process(documents: list[tuple[str, object]]) -> bool:
    return any(name == "process" for name, _ in documents)


def run_state(run: Run) -> tuple[State, str]:
    """State of all ranks together, and the words for it; the worst rank decides."""
    for rank in run.ranks:
        if rank.ending is not None and rank.ending.exit_code != 0:
            why = f" ({rank.ending.exception})" if rank.ending.exception else ""
            return State.FAILED, f"rank {rank.process.rank} ended with exit code {rank.ending.exit_code}{why}"
    stopped = [rank.process.rank for rank in run.ranks if rank.has_stopped]
    unended = [rank for rank in run.ranks if rank.ending is None and not rank.has_stopped]
    for rank in unended:
        if lives(rank.process) is False:
            return (
                State.KILLED,
                f"rank {rank.process.rank} ended without a word: killed, or crashed hard",
            )
    if any(lives(rank.process) is None for rank in unended):
        hosts = ", ".join(sorted({rank.process.host for rank in unended}))
        return State.SILENT, f"no ending recorded; the processes are on {hosts}"
    if unended:
        return State.RUNNING, "running"
    if stopped:
        return State.STOPPED, f"rank {stopped[0]} was not recorded to its end"
    return State.FINISHED, "finished"


class Watcher:
    """Hands out a snapshot when there is something new to see; `poll` belongs in a worker thread."""

    def __init__(self, directory: Path, hardware: Hardware | None = None) -> None:
        self.directory = directory
        self.hardware = hardware
        self.is_gone = False
        self._seen: Fingerprint = None
        self._next_read_s = 0.0
        self._last: Snapshot | None = None

    def poll(self) -> Snapshot | None:
        """A new snapshot, or None while nothing has changed.

        A big run is read again only after a pause of twice the time that reading it took.
        """
        now = fingerprint(self.directory)
        self.is_gone = now is None and self._last is not None
        if self.is_gone:
            return None
        if now == self._seen and self._last is not None:
            return self._with_new_state()
        if time.monotonic() < self._next_read_s:
            return None
        start_s = time.monotonic()
        self._last = read_snapshot(self.directory, self.hardware)
        self._seen = now
        end_s = time.monotonic()
        self._next_read_s = end_s + 2 * (end_s - start_s)
        return self._last

    def _with_new_state(self) -> Snapshot | None:
        """A process may die without another word in its journal, or without any."""
        last = self._last
        if last is not None and last.run is None and last.error is None:
            if awaits_first_flush(self.directory):
                return None
            self._last = read_snapshot(self.directory, self.hardware)
            return self._last
        if last is None or last.run is None or last.state not in (State.RUNNING, State.SILENT):
            return None
        state, message = run_state(last.run)
        if state is last.state:
            return None
        self._last = Snapshot(run=last.run, analysis=last.analysis, state=state, message=message)
        return self._last
