"""What units return and the script holds: in a list until the loss is known, or for the units behind them."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.allocation_sequence import planned_sequence
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.write_schedule import write_schedule
from tests.cost.test_allocation_sequence import exact_peak
from tests.engines.activations.test_caches import Cache
from tests.engines.trainings import make_plan
from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import BATCH, LENGTH, VOCABULARY, WIDTH, Gpt, recorded


@dataclass
class Made:
    x: torch.Tensor
    scores: torch.Tensor


class Attending(nn.Module):
    """Returns what it has saved, in an object."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, scale):
        q, k, v = self.qkv(self.norm(x)).split(WIDTH, -1)
        scores = (q @ k.transpose(1, 2)).softmax(-1)
        return Made(x + scores @ v, scores)


class Collecting(Gpt):
    """Has all scores in a list until its forward ends, whose loss is the fullest moment."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attending() for _ in range(4))

    def forward(self, words):
        made = [Made(self.tokens(words), words)]
        for block in self.blocks:
            made.append(block(made[-1].x, None))
        return self.head(made[-1].x).repeat(1, 1, 8).softmax(-1).mean()

    def loss(self):
        return self(torch.randint(VOCABULARY, (BATCH, LENGTH)))


class Keeping(Collecting):
    """Has them until the next step: each is there twice while its block runs again."""

    def forward(self, words):
        self.made = [Made(self.tokens(words), words)]
        for block in self.blocks:
            self.made.append(block(self.made[-1].x, None))
        return self.head(self.made[-1].x).square().mean()


class Dense(nn.Module):
    """A layer is called with a list of all that those before it have made; none of that is saved by autograd."""

    class Layer(nn.Module):
        def __init__(self, num_before):
            super().__init__()
            self.up, self.down = nn.Conv2d(8 * num_before, 32, 1), nn.Conv2d(32, 8, 3, padding=1)

        def forward(self, before):
            return self.down(F.gelu(self.up(torch.cat(before, 1))))

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(40, 10)
        self.layers = nn.ModuleList(Dense.Layer(number) for number in range(1, 5))

    def loss(self):
        made = [self.stem(torch.randn(BATCH, 3, 16, 16))]
        for layer in self.layers:
            made.append(layer(made))
        return self.head(torch.cat(made, 1).mean((2, 3))).square().mean()


class Caching(Gpt):
    """Its blocks put keys, which are repeated before they are used, in a cache, until its forward ends."""

    make_cache = Cache
    holds = False  # until the next forward has ended

    class Block(nn.Module):
        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx, self.qkv = layer_idx, nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x, cache=None):
            q, k, v = self.qkv(x).tanh().split(WIDTH, -1)
            k = k[..., ::2].contiguous()
            if cache is not None:
                k = cache.update(k, self.layer_idx)
            k = k.repeat(1, 1, 2)
            return x + (q @ k.transpose(1, 2)).softmax(-1) @ v

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(number) for number in range(4))

    def forward(self, words):
        x, cache = self.tokens(words), self.make_cache()
        for block in self.blocks:
            x = block(x, cache=cache)
        logits = self.head(x)
        logits.detach().repeat(1, 1, 16)  # the fullest moment
        if self.holds:
            self.outputs = cache
        return logits.square().mean()

    def loss(self):
        return self(torch.randint(VOCABULARY, (BATCH, LENGTH)))


class TwoCaches(Cache):
    """As of an encoder and a decoder: a cache that holds others, one of which is used here."""

    def __init__(self):
        super().__init__()
        self.own, self.of_encoder = Cache(), Cache()

    def get_seq_length(self, layer_idx):
        return self.own.get_seq_length(layer_idx)

    def update(self, keys, layer_idx):
        return self.own.update(keys, layer_idx)


class CachingInOneOfTwo(Caching):
    """Predicted 2.7 % too high with T5 of transformers, whose decoder has such a cache."""

    make_cache = TwoCaches


@pytest.mark.parametrize("kind", [Collecting, Keeping, Dense, Caching, CachingInOneOfTwo])
def test_what_the_script_holds_is_not_freed_by_recomputing_its_maker(kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    names = [f"{'layers' if kind is Dense else 'blocks'}.{number}" for number in range(4)]
    predicted, measured, losses = predicted_and_measured(kind, 1, names, bf16=False)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=1e-3)


class HeldWithItsCache(Caching):
    """Autograd keeps what the cache holds, and the script has the cache until its next forward has ended, as it has
    `outputs.past_key_values`."""

    holds = True

    class Block(nn.Module):
        def __init__(self, layer_idx):
            super().__init__()
            self.layer_idx, self.qkv = layer_idx, nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x, cache=None):
            q, k, v = (each.contiguous() for each in self.qkv(x).tanh().split(WIDTH, -1))
            if cache is not None:
                k = cache.update(k, self.layer_idx)
            return x + (q @ k.transpose(1, 2)).softmax(-1) @ v


def test_what_a_held_cache_has_of_recomputed_units_is_not_there_in_later_micro_batches(monkeypatch):
    """Predicted 4 % too high with GPT-2 of transformers: `outputs` is there until the next micro-batch's."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    predicted, measured, losses = predicted_and_measured(HeldWithItsCache, 2, range(4), bf16=False)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=1e-3)


def test_an_allocator_is_not_asked_for_what_a_held_cache_would_have_of_recomputed_units(monkeypatch):
    """On a GPU the peak is the replay's: GPT-2's was predicted 12 to 20 % too high, and as much more to be reserved."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    run, _ = recorded(HeldWithItsCache, 2, bf16=False)
    step = captured_step(run)
    units = tuple(UnitPlan(name=f"blocks.{n}", zero_stage=0, recompute=True) for n in range(4))
    schedule = write_schedule(make_plan(1, units=units), step.units)
    played = exact_peak(planned_sequence(step, schedule, None))

    assert played == pytest.approx(simulate(step, schedule, None).prediction().peak_bytes, rel=0.02)
