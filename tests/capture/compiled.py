"""Compiled trainings that say how often Dynamo compiled, as rows of JSON: `compiled.py [profiled]`."""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import memadvisor


class Block(nn.Module):
    def __init__(self, is_whole):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.is_whole = is_whole

    def forward(self, x):
        y = self.second(self.first(x))
        if not self.is_whole:
            torch._dynamo.graph_break()
        return self.first(y) + x


class Model(nn.Module):
    def __init__(self, is_whole):
        super().__init__()
        self.blocks = nn.ModuleList(Block(is_whole) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compiled_training(kind, is_whole, backend):
    """(model, loss of a batch), with what `kind` says compiled."""
    options = {"backend": backend, "fullgraph": is_whole}
    model = Model(is_whole)
    if kind in ("model", "inside"):
        model = torch.compile(model, **options)
    elif kind == "in_place":
        model.compile(**options)
    elif kind == "blocks":
        for block in model.blocks:
            block.compile(**options)

    def loss_of(x):
        return model(x).pow(2).mean()

    return model, torch.compile(loss_of, **options) if kind == "step" else loss_of


def train(kind, graph, is_profiled):
    """Rows of (kind, graph, moment or fact, values); the moments have the same values with and without us."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    backend = CompileCounterWithBackend("aot_eager")
    model, loss_of = compiled_training(kind, graph == "full", backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(moment, number):
        loss = torch.zeros(())
        for _ in range(number):
            loss = loss_of(torch.randn(4, 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        return kind, graph, moment, backend.frame_count, graphs, breaks, dict(counters["frames"]), loss.item()

    with tempfile.TemporaryDirectory() as directory:
        profile = memadvisor.profile(Path(directory) / "run") if is_profiled else contextlib.nullcontext()
        yield steps("before", 0 if kind == "inside" else 2)  # then Dynamo sees it under our hooks first
        with profile as prof:
            yield steps("timed", 2)
            yield steps("traced", 1)
            yield steps("timed again", 2)
        yield steps("afterwards", 2)
        if prof is not None:
            rank = prof.run.ranks[0]
            yield kind, graph, "peak bytes", rank.traced_step.peak_allocated_bytes
            yield kind, graph, "unexplained bytes", max(abs(row.unexplained_bytes) for row in rank.residuals)


def main(*words):
    for kind in ("model", "inside", "in_place", "blocks", "step"):
        for graph in ("full", "broken"):
            for row in train(kind, graph, "profiled" in words):
                print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
