"""What holds for all tests: no result hangs on how fast the machine is, and none fights another for the cores.

Each process that runs tests has one thread for torch's operators, and so has what it starts: OpenMP's threads of
several processes on as many cores spend most of their time on waiting for each other. Operators on several threads
are what the family `networks` of tests/capture/zoo runs on.

Who records a training looks through all objects that Python's garbage collector knows, several times. Of those of a
process that runs tests, most are torch's and pytest's own.

What its engines take beside a training is measured by each recording, which takes a tenth of a second: as long as many
a recording of a test. It is a matter of the process, so each process measures it once.

Property tests draw the same examples every time, so that a change passes or fails for what it changes.
`--hypothesis-profile=new` draws others.

torch's profiler reads how much it prints when a process first uses it. A test of its own use of it would have that printed
beside what all tests behind it record.

Where Python is told to write no bytecode, as in many containers, each process would compile all of ours, which takes
longer than most of what is tested.
"""

import functools
import gc
import os
import sys

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None)
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def _profiler_prints_nothing():
    """Of this process: what it starts has torch's own."""
    torch = sys.modules.get("torch")
    if torch is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KINETO_LOG_LEVEL", "6")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
                pass


@pytest.fixture(scope="session", autouse=True)
def _engines_are_measured_once():
    from memadvisor import api  # whose bytecode is written by now

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "measure_engines", functools.cache(api.measure_engines))
        yield


@pytest.fixture(scope="module", autouse=True)
def _objects_that_are_there_are_not_looked_through():
    """What is alive before a file's first test, torch and all tests among it, is no concern of its recordings."""
    gc.collect()  # else what is garbage by now would stay
    gc.freeze()
