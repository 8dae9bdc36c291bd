"""While a script captures into a CUDA graph nobody is told of anything; no GPU is needed to see that."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

import memadvisor
from memadvisor.cuda_graphs import is_replayed


class Graph:
    """Stands for one of torch's, which no CPU can make: its capture records whether any hook was there."""

    had_hooks = None

    def begin(self):
        torch.cuda.CUDAGraph.capture_begin(self)

    def end(self):
        torch.cuda.CUDAGraph.capture_end(self)


def notes_hooks(graph):
    graph.had_hooks = bool(torch_module._global_forward_pre_hooks or torch_module._global_forward_hooks)


@pytest.fixture
def graph(monkeypatch):
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda graph: None)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", notes_hooks)
    return Graph()


def steps(model, optimizer, count):
    for _ in range(count):
        loss = F.mse_loss(model(torch.ones(4, 8)), torch.zeros(4, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_steps_before_and_after_a_capture_are_seen_and_the_captured_one_is_not(tmp_path, graph):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        steps(model, optimizer, 4)
        graph.begin()
        steps(model, optimizer, 1)
        graph.end()
        steps(model, optimizer, 2)

    assert graph.had_hooks is False
    rank = prof.run.ranks[0]
    assert len(rank.steps) == 6
    assert [step.traced for step in rank.steps].count(True) == 1
    assert sum("CUDA graph" in note.text for note in rank.notes) == 1
    assert not torch_module._has_any_global_hook()


def test_a_capture_that_fails_leaves_the_recording_as_it_was(tmp_path, graph, monkeypatch):
    def refuses(self):
        raise RuntimeError("a capture is under way")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", refuses)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        with pytest.raises(RuntimeError, match="a capture is under way"):
            graph.begin()
        steps(model, optimizer, 3)

    assert len(prof.run.ranks[0].steps) == 3


def test_a_module_whose_forward_torch_has_replaced_by_a_replay_is_known():
    def replay(*args):
        return args

    replay.__module__ = torch.cuda.make_graphed_callables.__module__  # where torch defines its own
    module = nn.Linear(8, 8)
    assert not is_replayed(module)
    module.forward = replay
    assert is_replayed(module)


def test_graphs_that_torch_compile_captures_are_said_to_be_unseen(tmp_path, graph):
    """Of mode "reduce-overhead" on a GPU nothing was said, though no hook is called while it captures: neither are its
    replays' operators seen."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trees = {"__name__": "torch._inductor.cudagraph_trees", "graph": graph}
    exec("def record():\n    graph.begin()\n    graph.end()", trees)
    with memadvisor.profile(tmp_path / "run") as prof:
        steps(model, optimizer, 4)
        trees["record"]()
        trees["record"]()
        steps(model, optimizer, 1)

    assert sum("CUDA graph" in note.text for note in prof.run.ranks[0].notes) == 1
