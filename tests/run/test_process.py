"""Whether the process that wrote a journal still lives."""

import dataclasses
import os
import socket
import sys

import pytest

from memadvisor.run import process as process_module
from memadvisor.run.process import lives, own_mark
from tests.make_run import make_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process started")


def writer_of(**changes):
    """This very process, as a journal names it, or one like it."""
    fields = {"host": socket.gethostname(), "pid": os.getpid(), "mark": own_mark(), **changes}
    return dataclasses.replace(make_run(num_ranks=1).ranks[0].process, **fields)


def test_this_process_lives():
    assert lives(writer_of()) is True


def test_a_process_that_was_given_the_number_of_a_dead_one_is_not_it():
    scope, _, start = own_mark().rpartition(" ")

    assert lives(writer_of(mark=f"{scope} {int(start) - 1}")) is False


def test_a_process_that_nobody_has_waited_for_is_dead():
    ready, tell = os.pipe()
    hold, let_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, own_mark().encode())
        os.read(hold, 1)
        os._exit(0)
    child = writer_of(pid=pid, mark=os.read(ready, 1000).decode())
    assert lives(child) is True
    os.write(let_go, b"x")
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert lives(child) is False
    os.waitpid(pid, 0)
    assert lives(child) is False


@pytest.mark.parametrize("mark", ["another boot pid:[1] 5", "", "\x00"])
def test_of_another_machine_or_container_nothing_is_known(mark):
    """Also where its host has the same name."""
    assert lives(writer_of(mark=mark)) is None


def test_a_run_of_an_older_version_goes_by_host_and_number():
    assert lives(writer_of(mark=None)) is True
    assert lives(writer_of(mark=None, host="another")) is None
    assert lives(writer_of(mark=None, pid=-1)) is None


def test_where_the_system_does_not_tell_there_is_no_mark(monkeypatch, tmp_path):
    monkeypatch.setattr(process_module, "_PROC", tmp_path)

    assert own_mark() is None
