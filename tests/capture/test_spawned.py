"""Ranks that the script spawns find memadvisor where the process that started them does."""

import pickle
import subprocess
import sys
from importlib.machinery import PathFinder

import torch.multiprocessing.spawn  # noqa: F401  SpawnedRank asks for it

from memadvisor.capture.children import SpawnedRank

LOADS = """
import pickle, sys, types
sys.modules["torch.multiprocessing.spawn"] = types.SimpleNamespace(_wrap=print)
rank = pickle.load(sys.stdin.buffer)
print(type(rank).__name__, rank._record)
"""


def loaded(pickled):
    """What a process without site packages says of it."""
    words = [sys.executable, "-I", "-S", "-c", LOADS]
    return subprocess.run(words, input=pickled, capture_output=True, timeout=60)


def test_of_a_checkout_that_is_not_installed_a_spawned_rank_finds_it(monkeypatch):
    """The script's directory takes its place on the path, as in `python script.py`: the rank ended in ModuleNotFoundError."""
    assert b"No module named 'memadvisor'" in loaded(pickle.dumps(SpawnedRank(len))).stderr

    monkeypatch.setattr(PathFinder, "find_spec", lambda *_: None)
    done = loaded(pickle.dumps(SpawnedRank(len)))

    assert done.stdout == b"SpawnedRank <built-in function len>\n", done.stderr
