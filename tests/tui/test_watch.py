import dataclasses
import os
import shutil
import socket
import time

import pytest

from memadvisor.run.journal import JournalWriter
from memadvisor.tui.watch import State, Watcher, awaits_first_flush, fingerprint, run_state
from tests.make_run import make_run, stopped, write_run


def at_home(run, **changes):
    """The run as if its processes ran on this machine, as this very process unless `pid` says otherwise."""
    fields = {"host": socket.gethostname(), "pid": os.getpid(), **changes}
    ranks = tuple(
        dataclasses.replace(rank, process=dataclasses.replace(rank.process, **fields)) for rank in run.ranks
    )
    return dataclasses.replace(run, ranks=ranks)


def next_snapshot(watcher):
    """What the next reading gives; the watcher rests for twice the time that the last one took."""
    while (snapshot := watcher.poll()) is None:
        time.sleep(0.001)
    return snapshot


def dead_pid():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


@pytest.mark.parametrize(
    ("run", "state", "words"),
    [
        (make_run(), State.FINISHED, "finished"),
        (make_run(exit_code=3, exception="ValueError"), State.FAILED, "exit code 3 (ValueError)"),
        (make_run(exit_code=None), State.SILENT, "node0"),
        (at_home(make_run(exit_code=None)), State.RUNNING, "running"),
    ],
)
def test_what_the_journals_say_decides_how_a_run_stands(run, state, words):
    found, message = run_state(run)

    assert found is state
    assert words in message


def test_a_run_whose_recorder_gave_up_neither_runs_nor_was_killed():
    run = at_home(make_run(exit_code=None))
    first, other = run.ranks[:2]

    both = dataclasses.replace(run, ranks=(stopped(first), stopped(other)))
    assert run_state(both) == (State.STOPPED, "rank 0 was not recorded to its end")
    assert run_state(dataclasses.replace(run, ranks=(stopped(first), other)))[0] is State.RUNNING


def test_a_process_that_is_gone_without_an_ending_was_killed():
    assert run_state(at_home(make_run(exit_code=None), pid=dead_pid()))[0] is State.KILLED


def test_nothing_is_read_while_no_file_changes(tmp_path):
    watcher = Watcher(write_run(make_run(), tmp_path / "run"))

    assert watcher.poll().run is not None
    assert watcher.poll() is None


def test_a_journal_that_grew_is_read_again(tmp_path):
    rank = make_run(num_ranks=1).ranks[0]
    writer = JournalWriter(tmp_path / "rank0.pid1.journal")
    writer.write_document("process", dataclasses.asdict(rank.process))
    writer.write_rows("steps", rank.steps[:5])
    watcher = Watcher(tmp_path)
    assert len(watcher.poll().run.ranks[0].steps) == 5
    writer.write_rows("steps", rank.steps[5:])

    assert len(next_snapshot(watcher).run.ranks[0].steps) == 8


def test_a_run_whose_process_dies_silently_becomes_killed(tmp_path, monkeypatch):
    watcher = Watcher(write_run(at_home(make_run(num_ranks=1, exit_code=None)), tmp_path / "run"))
    assert watcher.poll().state is State.RUNNING

    def gone(pid, signal):
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)

    assert watcher.poll().state is State.KILLED
    assert watcher.poll() is None


def test_a_directory_that_vanishes_is_noticed_and_nothing_is_lost(tmp_path):
    directory = write_run(make_run(), tmp_path / "run")
    watcher = Watcher(directory)
    watcher.poll()
    shutil.rmtree(directory)

    assert watcher.poll() is None
    assert watcher.is_gone


def test_a_run_that_has_only_begun_waits_for_its_first_flush(tmp_path):
    directory = write_run(dataclasses.replace(make_run(), ranks=()), tmp_path / "run")
    assert awaits_first_flush(directory)
    JournalWriter(directory / "rank0.pid1.journal").close()
    assert awaits_first_flush(directory)

    snapshot = Watcher(directory).poll()

    assert (snapshot.state, snapshot.message, snapshot.error) == (
        State.WAITING,
        "waiting for the first flush",
        None,
    )


def test_a_run_that_has_said_nothing_for_long_is_not_waited_for(tmp_path):
    """A journal that was cut off before its first words: the screen waited for ever."""
    directory = write_run(dataclasses.replace(make_run(), ranks=()), tmp_path / "run")
    JournalWriter(directory / "rank0.pid1.journal").close()
    watcher = Watcher(directory)
    assert watcher.poll().error is None
    assert watcher.poll() is None
    before_s = time.time() - 100
    for path in directory.iterdir():
        os.utime(path, (before_s, before_s))
    watcher._seen = fingerprint(directory)  # no file changes while time goes by

    assert "no readable rank" in watcher.poll().message
    assert "no readable rank" in Watcher(directory).poll().message


def test_a_directory_that_is_no_run_is_an_error_and_not_waited_for(tmp_path):
    assert not awaits_first_flush(tmp_path)
    assert "is not a run" in Watcher(tmp_path).poll().message
    (tmp_path / "rank0.pid1.journal").write_bytes(b"garbage" * 100)
    assert not awaits_first_flush(tmp_path)
    assert "no readable rank" in Watcher(tmp_path).poll().message


def test_the_fingerprint_sees_growth_and_absence(tmp_path):
    assert fingerprint(tmp_path / "none") is None
    before = fingerprint(tmp_path)
    (tmp_path / "a").write_text("x")
    assert fingerprint(tmp_path) != before
