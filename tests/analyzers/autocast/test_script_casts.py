"""Casts and regions of the script's own, which do nothing in float32, are there in what is predicted for autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.analyzers.autocast.step import required_autocast
from tests.analyzers.autocast.test_step import LENGTH, WIDTH, WORDS, peak_bytes, recorded


class Norm(nn.Module):
    """Of transformers' models: in float32, and back in the dtype that it was given."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width)) if width else None

    def forward(self, x):
        input_dtype = x.dtype
        x = x.to(torch.float32)
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(input_dtype)
        return x if self.scale is None else self.scale * x


class Normed(nn.Module):
    """Queries and keys through norms, scores written out, their softmax in float32."""

    def __init__(self, make_norm):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm = make_norm(), make_norm()

    def forward(self, x):
        q, k = self.q_norm(self.q(x)), self.k_norm(self.k(x))
        scores = (q @ k.transpose(-2, -1)).softmax(-1, dtype=torch.float32).to(q.dtype)
        return x + self.out(scores @ self.v(x))


class Experts(nn.Module):
    """Results of experts cast to the dtype of what they are added to; the second time of what came of that."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        order = torch.arange(len(flat)).chunk(2)
        for first, second in ((0, 1), (2, 3)):
            out = torch.zeros_like(flat)
            for number, rows in zip((first, second), order, strict=True):
                out = out.index_add(0, rows, self.experts[number](flat[rows]).to(out.dtype))
            flat = flat + out
        return flat.view_as(x)


class Off(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(x)
        with torch.autocast("cpu", enabled=False):
            y = self.down(F.gelu(y.float()))
        return y


class LikeAnother(nn.Module):
    """Back to the dtype of a tensor, which the run tells."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(x)
        return self.down(y.float().sigmoid().type_as(y) * y)


class Words(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(*blocks)

    def forward(self, words):
        return self.blocks(self.tokens(words))


def squares(model, _):
    yield model(torch.randint(WORDS, (16, LENGTH))).square().mean()


MODELS = {
    "norms": lambda: Words(Normed(lambda: Norm(WIDTH)), Normed(lambda: Norm(WIDTH))),
    "norms without weights": lambda: Words(Normed(lambda: Norm(0)), Normed(lambda: Norm(0))),
    "experts": lambda: Words(Experts()),
    "off": lambda: Words(Off(), Off()),
    "like another": lambda: Words(LikeAnother(), LikeAnother()),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_autocast_by_hand(tmp_path, name):
    plain = recorded(tmp_path / "plain", MODELS[name], of=squares).ranks[0]
    by_hand = recorded(tmp_path / "hand", MODELS[name], by_hand=True, of=squares).ranks[0]
    predicted = peak_bytes(required_autocast(plain))
    assert predicted == pytest.approx(by_hand.traced_step.peak_allocated_bytes, rel=0.002)


class WithLoss(nn.Module):
    """Its forward has the last norm's result in a variable while it computes the loss, on logits in float32."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        hidden = self.norm(self.tokens(words))
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def own_losses(model, _):
    yield model(torch.randint(WORDS, (16, LENGTH)))


def test_what_a_forward_holds_while_it_computes_its_loss_is_there(tmp_path):
    plain = recorded(tmp_path / "plain", WithLoss, of=own_losses).ranks[0]
    by_hand = recorded(tmp_path / "hand", WithLoss, by_hand=True, of=own_losses).ranks[0]
    predicted = peak_bytes(required_autocast(plain))
    assert predicted == pytest.approx(by_hand.traced_step.peak_allocated_bytes, rel=0.002)
