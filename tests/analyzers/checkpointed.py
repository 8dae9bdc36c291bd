"""Small trainings with and without checkpoints, profiled: what the prediction from the plain one is held to."""

from __future__ import annotations

import contextlib
import gc
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memadvisor
from memadvisor.run.run import RankRun


class Again(nn.Module):
    """What a user writes around a module: its forward keeps its inputs, and runs again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


class Attention(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (t.view(batch, length, 4, dim // 4).transpose(1, 2) for t in self.qkv(x).split(dim, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, dropout)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, dim=64, layers=4, vocabulary=256, length=128, dropout=0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(Block(dim, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return self.relu(out)


class Cnn(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(channels), Residual(channels))
        self.layer2 = nn.Sequential(Residual(channels))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.pool(self.layer2(self.layer1(self.stem(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 64)
        self.first = nn.LSTM(64, 96, batch_first=True)
        self.second = nn.LSTM(96, 96, batch_first=True)
        self.head = nn.Linear(96, 256)

    def forward(self, tokens):
        return self.head(self.second(self.first(self.tokens(tokens))[0])[0])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 64)
        layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(3)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        return self.head(self.layers(self.tokens(tokens)))


class Shared(nn.Module):
    """One block called three times, as in a Universal Transformer, behind frozen embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 64).requires_grad_(False)
        self.block = Block(64, 0.0)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


def train(model: nn.Module, *, autocast: bool = False, micro_batches: int = 1, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = isinstance(model, Cnn)
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(8, 3, 32, 32) if images else torch.randint(0, 256, (4, 128))
            target = torch.randint(0, 10, (8,)) if images else torch.randint(0, 256, (4, 128))
            context = torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
            with context:
                loss = loss_of(model, x, target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), target.flatten())


def with_checkpoints(model: nn.Module, kind: str) -> nn.Module:
    """The model with all modules of that name, where * stands for a number, checkpointed."""
    pattern = re.compile(re.escape(kind).replace(r"\*", r"\d+") + "$")
    for name, module in list(model.named_modules()):
        if pattern.match(name):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Again(module))
    return model


def profiled(model: nn.Module, directory: Path, **settings) -> RankRun:
    gc.collect()  # what tests before this one left in cycles is not freed in the traced step
    with memadvisor.profile(directory, trace_step=1) as prof:
        train(model, **settings)
    return prof.run.ranks[0]
