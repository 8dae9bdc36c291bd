"""What the benchmark takes from torch's record of allocations is what the simulator can replay."""

import importlib.util
from pathlib import Path

import torch

from memadvisor.cost.allocator_replay import Change, replay
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings

PATH = Path(__file__).parents[2] / "benchmarks" / "allocator_models.py"


def test_torchs_trace_becomes_a_sequence_of_changes(monkeypatch):
    """An address that is used twice is two allocations; a free of what came before the record is left out."""
    spec = importlib.util.spec_from_file_location("allocator_models", PATH)
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    trace = [
        {"action": "free_completed", "addr": 7, "size": 1, "stream": 0},
        {"action": "segment_alloc", "addr": 64, "size": 20 * MIB, "stream": 0},
        {"action": "alloc", "addr": 64, "size": 3 * MIB, "stream": 0},
        {"action": "free_requested", "addr": 64, "size": 3 * MIB, "stream": 0},
        {"action": "free_completed", "addr": 64, "size": 3 * MIB, "stream": 0},
        {"action": "alloc", "addr": 64, "size": 5 * MIB, "stream": 0},
    ]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [trace]})

    changes = [Change(*change) for change in models.history()]
    assert changes == [Change(0, 3 * MIB), Change(0, 0), Change(1, 5 * MIB)]
    assert replay(changes, AllocatorSettings()).peak_reserved_bytes == 20 * MIB
