"""A small transformer trained in one way or another: what a change of the script is predicted to do, and does."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.run.run import Run

WIDTH, HEADS, LENGTH, VOCABULARY = 64, 4, 96, 256


class Attention(nn.Module):
    def __init__(self, ways: set[str]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ways = ways

    def forward(self, x):
        batch = x.shape[0]
        q, k, v = (t.view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if "sdpa" in self.ways:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            weights = (q @ k.transpose(-2, -1) / 4).masked_fill(later, float("-inf")).softmax(-1)
            mixed = (F.dropout(weights, 0.1) if "dropout" in self.ways else weights) @ v
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, ways: set[str]) -> None:
        super().__init__()
        self.attention = Attention(ways)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, ways: set[str], layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(ways) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(path: Path, *ways: str, batch: int = 4, layers: int = 3, micro_batches: int = 1) -> Run:
    """Four steps, the third of them traced.

    Ways to be wasteful, which nothing else is: keeps (every output), zeros (in gradients), late (`zero_grad` after the
    forward). Ways not to be: sdpa, fused, del (of the output before the backward), view (gradients as DDP's buckets),
    no_sync. ddp: wrapped in DistributedDataParallel.
    """
    given = set(ways)
    gc.collect()
    torch.manual_seed(0)
    model = Gpt(given, layers)
    net: nn.Module = model
    if "ddp" in given:
        net = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view="view" in given)
    optimizer = torch.optim.AdamW(model.parameters(), fused="fused" in given)
    kept = []
    with memadvisor.profile(path) as profile:
        for _ in range(4):
            if "late" not in given:
                optimizer.zero_grad(set_to_none="zeros" not in given)
            for micro_batch in range(micro_batches):
                text = torch.randint(VOCABULARY, (batch, LENGTH + 1))
                is_last = micro_batch == micro_batches - 1
                waits = "no_sync" in given and not is_last
                with net.no_sync() if waits else contextlib.nullcontext():
                    output = net(text[:, :-1])
                    loss = F.cross_entropy(output.flatten(0, 1), text[:, 1:].flatten())
                    if "late" in given and micro_batch == 0:
                        optimizer.zero_grad()
                    if "keeps" in given:
                        kept.append(output)
                    if "del" in given:
                        del output
                    loss.backward()
            optimizer.step()
    return profile.run
