"""Small trainings of many kinds, as scripts: `python zoo.py NAME` trains five steps and prints its losses.

They know nothing of memadvisor. Kinds that profilers get wrong: temporaries inside operators, autocast's
weight cache, checkpointing, several optimizers, data-dependent shapes, second-order gradients.
"""

import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 5


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = (
            t.view(batch, length, 4, dim // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).split(dim, 2)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, *, tied=False, recompute=False, dim=64, layers=3, vocabulary=256, length=64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def next_token_loss(model):
    tokens = torch.randint(0, 256, (4, 65))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model, loss_of, optimizer=None, accumulate=1):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        for _ in range(accumulate):
            loss = loss_of(model)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, repr(loss.item()))


def gpt():
    train(Gpt(), next_token_loss)


def gpt_tied_accumulated():
    train(Gpt(tied=True), next_token_loss, accumulate=3)


def gpt_checkpointed():
    train(Gpt(recompute=True), next_token_loss)


def gpt_autocast():
    def loss_of(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token_loss(model)

    train(Gpt(), loss_of)


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


def cnn():
    model = nn.Sequential(
        *[
            nn.Sequential(nn.Conv2d(c, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
            for c in (3, 32, 32)
        ],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )

    def loss_of(model):
        return F.cross_entropy(model(torch.randn(8, 3, 32, 32)), torch.randint(0, 10, (8,)))

    train(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def lstm():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(256, 64)
            self.lstm = nn.LSTM(64, 96, num_layers=2, batch_first=True)
            self.head = nn.Linear(96, 256)

        def forward(self, tokens):
            return self.head(self.lstm(self.tokens(tokens))[0])

    train(Language(), next_token_loss)


def encoder():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(256, 64)
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
            self.head = nn.Linear(64, 256)

        def forward(self, tokens):
            return self.head(self.layers(self.tokens(tokens)))

    train(Encoder(), next_token_loss)


def distances():
    model = nn.Linear(32, 32)

    def loss_of(model):
        x = model(torch.randn(300, 32))
        return torch.cdist(x, x).logsumexp(1).mean()

    train(model, loss_of)


def experts():
    class Experts(nn.Module):
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

    train(Experts(), next_token_loss)


def gan():
    generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64))
    judge = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    first = torch.optim.Adam(judge.parameters())
    second = torch.optim.Adam(generator.parameters())
    for step in range(STEPS):
        first.zero_grad()
        fake = generator(torch.randn(64, 16))
        loss = judge(fake.detach()).mean() - judge(torch.randn(64, 64)).mean()
        loss.backward()
        first.step()
        second.zero_grad()
        (-judge(fake).mean()).backward()
        second.step()
        print(step, repr(loss.item()))


def penalty():
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss_of(model):
        x = torch.randn(128, 32, requires_grad=True)
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.pow(2).sum()

    train(model, loss_of)


def loader():
    data = torch.utils.data.TensorDataset(torch.randint(0, 256, (40, 65)))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=8, num_workers=1))

    def loss_of(model):
        (tokens,) = next(batches)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    train(Gpt(layers=1), loss_of)


def exported():
    model = Gpt(layers=1)
    seen = [parameter.detach().numpy() for parameter in model.parameters()]
    data = torch.from_numpy(np.arange(40 * 65) % 256).view(40, 65)

    def loss_of(model):
        tokens = data[torch.randint(0, 40, (8,))]
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    train(model, loss_of)
    print(len(seen))


def closure():
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(128, 32)

    def evaluate():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    for step in range(STEPS):
        print(step, repr(optimizer.step(evaluate).item()))


def evaluation():
    model = Gpt(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(STEPS):
        loss = next_token_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.eval()
        with torch.no_grad():
            print(step, repr(next_token_loss(model).item()))
        model.train()


KINDS = [
    gpt, gpt_tied_accumulated, gpt_checkpointed, gpt_autocast, gpt_compiled, lora, cnn, lstm, encoder,
    distances, experts, gan, penalty, evaluation, loader, exported, closure,
]  # fmt: skip

if __name__ == "__main__":
    torch.manual_seed(0)
    {kind.__name__: kind for kind in KINDS}[sys.argv[1]]()
