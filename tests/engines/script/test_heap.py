"""glibc keeps what a step frees while a plan is applied, and gives it back when the plan is taken off."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from memadvisor.engines.script.heap import keep_freed_memory
from memadvisor.engines.script.undo import Undo

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds of glibc's malloc")

# Says whether a block of 64 MiB stays in resident memory after it is freed: kept, and undone.
PROGRAM = """
import resource, torch
from memadvisor.engines.script.heap import keep_freed_memory
from memadvisor.engines.script.undo import Undo

def stays():
    torch.empty(2**24).zero_()
    with open("/proc/self/statm") as counts:
        return int(counts.read().split()[1]) * resource.getpagesize() - before_bytes > 2**25

with open("/proc/self/statm") as counts:
    before_bytes = int(counts.read().split()[1]) * resource.getpagesize()
undo = Undo()
keep_freed_memory([torch.device("cpu")], 0, undo)
kept = stays()
undo.run()
print(kept, stays())
"""
OF_GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def test_a_freed_block_stays_until_undone():
    environment = {name: value for name, value in os.environ.items() if name not in OF_GLIBC}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=environment)
    assert done.stdout.split() == ["True", "False"]


def test_other_devices_and_thresholds_of_the_users_own_are_left_alone(monkeypatch):
    for name in OF_GLIBC:
        monkeypatch.delenv(name, raising=False)
    assert not keep_freed_memory([torch.device("cuda")], 0, Undo())
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=65536")
    assert not keep_freed_memory([torch.device("cpu")], 0, Undo())


def test_a_host_without_room_for_twice_the_states_of_its_ranks_is_left_alone(monkeypatch):
    for name in OF_GLIBC:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("memadvisor.engines.script.heap.free_host_bytes", lambda: 3199)
    assert not keep_freed_memory([torch.device("cpu")], 100, Undo())
    monkeypatch.setattr("memadvisor.engines.script.heap.free_host_bytes", lambda: None)
    assert not keep_freed_memory([torch.device("cpu")], 100, Undo())
