"""Trains one of several small models, and says by torch's own means what its CUDA allocator did.

Knows nothing of memadvisor. RESULT.json gets the peaks, how often torch reported that a step waited for the
device, and with --history every allocation and free in order, for a replay. On a CPU the numbers are null.

    python benchmarks/allocator_models.py RESULT.json MODEL [--device cpu] [--steps 8] [--history]
"""

import argparse
import itertools
import json
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 512


class Block(nn.Module):
    """Pre-norm attention and MLP, or a mixture of experts in its place."""

    def __init__(self, dim, experts):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.router = nn.Linear(dim, experts) if experts > 1 else None
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x):
        batch, length, dim = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, 8, dim // 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.feed(self.norms[1](x))

    def feed(self, x):
        if self.router is None:
            return self.experts[0](x)
        flat = x.reshape(-1, x.shape[-1])
        weight, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):  # as many tokens as chose it: other shapes each time
            chosen = (choice == number).nonzero().squeeze(1)
            out = out.index_add(0, chosen, expert(flat[chosen]) * weight[chosen, None])
        return out.view_as(x)


class Transformer(nn.Module):
    def __init__(self, layers, dim, experts=1):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, experts) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, layers, dim):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.lstm(self.embedding(tokens))[0])


class Convolutional(nn.Module):
    """Predicts one of VOCABULARY classes for each of an image's columns."""

    def __init__(self, layers, dim):
        super().__init__()
        widths = [3, *[dim] * layers]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        x = tokens.float().unsqueeze(1).unsqueeze(2).expand(-1, 3, 16, -1) / VOCABULARY
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(2).transpose(1, 2))


MODELS = ("gpt", "cnn", "lstm", "moe", "varying", "compiled")


def make_model(name, scale):
    if name == "cnn":
        return Convolutional(4, 16 * scale)
    if name == "lstm":
        return Recurrent(2, 64 * scale)
    return Transformer(4, 64 * scale, experts=4 if name == "moe" else 1)


def lengths(name, longest):
    """Tokens of a sequence, step by step: all alike, but where they vary."""
    return itertools.cycle(
        (longest, longest // 2, longest * 3 // 4, longest) if name == "varying" else (longest,)
    )


def train(args):
    torch.manual_seed(0)
    scale, longest, batch = (16, 512, 16) if args.device.startswith("cuda") else (1, 32, 4)
    model = make_model(args.model, scale).to(args.device)
    called = torch.compile(model) if args.model == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters())
    source = torch.Generator().manual_seed(1)
    for _, length in zip(range(args.steps), lengths(args.model, longest), strict=False):
        tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=source).to(args.device)
        loss = F.cross_entropy(called(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def history():
    """[number, bytes, stream] of every allocation, [number, 0, 0] of every free, in order."""
    changes, alive, numbers = [], {}, itertools.count()
    for entry in torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = next(numbers)
            changes.append([alive[entry["addr"]], entry["size"], entry["stream"]])
        elif entry["action"] == "free_completed" and entry["addr"] in alive:
            changes.append([alive.pop(entry["addr"]), 0, 0])
    return changes


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--history", action="store_true")
    args = parser.parse_args()
    on_cuda = args.device.startswith("cuda")
    if on_cuda and args.history:
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_cuda and not args.history:
            torch.cuda.set_sync_debug_mode("warn")
        loss = train(args)
        if on_cuda:
            torch.cuda.set_sync_debug_mode("default")
    told = {
        "loss": loss,
        "allocated_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_cuda else None,
        "num_waits": sum("synchroniz" in str(w.message) for w in caught) if on_cuda else None,
        "changes": history() if on_cuda and args.history else None,
    }
    args.result.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
