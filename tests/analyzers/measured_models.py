"""Small real models of four kinds, profiled, for analyzers that must agree with numbers worked out by hand."""

import functools
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memadvisor

BATCH, SEQUENCE, WIDTH, HEADS, VOCABULARY, LAYERS = 2, 16, 32, 4, 96, 2
TOKENS = BATCH * SEQUENCE


class Attention(nn.Module):
    """`style`: fused, written out, or with grouped queries (2 heads of keys)."""

    def __init__(self, style, *, causal=True):
        super().__init__()
        self.style, self.causal = style, causal
        self.key_heads = 2 if style == "grouped" else HEADS
        self.head = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * self.key_heads) * self.head, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        sizes = [HEADS * self.head, self.key_heads * self.head, self.key_heads * self.head]
        q, k, v = (
            part.view(batch, length, -1, self.head).transpose(1, 2)
            for part in self.qkv(x).split(sizes, dim=-1)
        )
        if self.style == "written out":
            scores = (q @ k.transpose(-1, -2)) * self.head**-0.5
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            y = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        else:
            grouped = self.style == "grouped"
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Mlp(nn.Module):
    def __init__(self, hidden, *, gated=False):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.gate = nn.Linear(WIDTH, hidden, bias=False) if gated else None
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(hidden)


class Experts(nn.Module):
    """Each token goes to its `active` best experts; every expert is called with the tokens it gets."""

    def __init__(self, num, active, hidden):
        super().__init__()
        self.active = active
        self.router = nn.Linear(WIDTH, num, bias=False)
        self.experts = nn.ModuleList(Mlp(hidden) for _ in range(num))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(self.active)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, bias=False) for _ in range(2)])
        self.attention, self.mlp = attention, mlp

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, style="fused", make_mlp=lambda: Mlp(4 * WIDTH), *, tied=False, causal=True):
        super().__init__()
        self.recompute = False
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block(Attention(style, causal=causal), make_mlp()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)

    def batch(self):
        return torch.randint(VOCABULARY, (BATCH, SEQUENCE))


class Bottleneck(nn.Module):
    """ResNet-50's block: 1x1, 3x3, 1x1, and a projection where the shape changes."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.reduce = nn.Conv2d(channels, width, 1, bias=False)
        self.spatial = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.expand = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.project = nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (width, width, 4 * width))

    def forward(self, x):
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.spatial(y)))
        return F.relu(self.norms[2](self.expand(y)) + self.project(x))


class Resnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False)
        self.blocks = nn.Sequential(Bottleneck(16, 8, 1), Bottleneck(32, 16, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.stem(images)), 2)
        return self.head(self.blocks(x).mean((2, 3)))

    def batch(self):
        return torch.randn(BATCH, 3, 32, 32)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])

    def batch(self):
        return torch.randint(VOCABULARY, (BATCH, SEQUENCE))


def profiled(model, *, num_micro_batches=1, between=lambda model: None):
    """The run of four steps of plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as directory:
        with memadvisor.profile(Path(directory) / "run") as prof:
            for _ in range(4):
                for _ in range(num_micro_batches):
                    model(model.batch()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                between(model)
        return prof.run


@functools.cache
def run_of(kind):
    """Each kind of model is profiled once for all tests."""
    torch.manual_seed(0)
    models = {
        "gpt": Gpt,
        "grouped": lambda: Gpt("grouped", lambda: Mlp(80, gated=True), tied=True),
        "written out": lambda: Gpt("written out"),
        "resnet": Resnet,
        "lstm": Recurrent,
        "moe": lambda: Gpt(make_mlp=lambda: Experts(4, 2, 2 * WIDTH)),
    }
    return profiled(models[kind]())
