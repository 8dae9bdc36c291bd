"""Language models: a small GPT under every option that changes where its memory goes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import train


class Block(nn.Module):
    def __init__(self, dim: int, *, eager: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )
        self.eager = eager

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (
            t.view(batch, length, 4, dim // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).split(dim, 2)
        )
        attend = eager_attention if self.eager else F.scaled_dot_product_attention
        x = x + self.out(attend(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


def eager_attention(q, k, v, *, is_causal):
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return F.dropout(scores.softmax(-1), 0.1) @ v


class Gpt(nn.Module):
    def __init__(
        self, *, tied=False, recompute=None, eager=False, dim=64, layers=3, vocabulary=256, length=64
    ) -> None:
        """`recompute`: None, "reentrant" or "non-reentrant"."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(Block(dim, eager=eager) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            if self.recompute is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return self.head(x)


def next_token_loss(model):
    tokens = torch.randint(0, 256, (4, 65))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def gpt():
    train(Gpt(), next_token_loss)


def gpt_eager():
    train(Gpt(eager=True), next_token_loss)


def gpt_tied_accumulated():
    train(Gpt(tied=True), next_token_loss, accumulate=3)


def gpt_checkpointed():
    train(Gpt(recompute="non-reentrant"), next_token_loss)


def gpt_checkpointed_reentrant():
    train(Gpt(recompute="reentrant", eager=True), next_token_loss)


def gpt_autocast():
    def loss_of(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token_loss(model)

    train(Gpt(), loss_of)


def gpt_autocast_checkpointed():
    """The backward runs outside autocast; what it recomputes runs inside it."""

    def loss_of(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token_loss(model)

    train(Gpt(recompute="non-reentrant"), loss_of)


def gpt_bfloat16():
    train(Gpt(layers=2).to(torch.bfloat16), next_token_loss)


def gpt_frozen():
    model = Gpt()
    for part in (model.tokens, *model.blocks[:2]):
        part.requires_grad_(False)
    train(model, next_token_loss, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


def gpt_compiled():
    model = torch.compile(Gpt(layers=1), backend="aot_eager")
    train(model, next_token_loss)


def lora():
    model = Gpt()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        block.out = nn.Sequential(block.out, nn.Linear(64, 4), nn.Linear(4, 64))
        block.out[0].requires_grad_(False)
    train(model, next_token_loss, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))


class Experts(nn.Module):
    """How many tokens reach an expert is known only when they are there."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, 64)
        self.gate = nn.Linear(64, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)
        )
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        x = self.tokens(tokens)
        chosen = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            out[mask] = expert(x[mask])
        return self.head(out)


def experts():
    train(Experts(), next_token_loss)


def sparse_gradients():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(256, 64, sparse=True)

        def forward(self, tokens):
            return self.tokens(tokens).tanh()

    model = Bag()

    def loss_of(model):
        return model(torch.randint(0, 256, (8, 16))).pow(2).sum()

    train(model, loss_of, torch.optim.SparseAdam(model.parameters()))


KINDS = [
    gpt, gpt_eager, gpt_tied_accumulated, gpt_checkpointed, gpt_checkpointed_reentrant, gpt_autocast,
    gpt_autocast_checkpointed, gpt_bfloat16, gpt_frozen, gpt_compiled, lora, experts, sparse_gradients,
]  # fmt: skip
