"""Key/value caches that a model hands its layers in training too, and recomputed units leave."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from memadvisor.errors import PlanError
from memadvisor.key_value_caches import tensors_of
from memadvisor.plan import UnitPlan
from tests.engines.trainings import applied, make_plan


class Cache:
    """As those of transformers: what a layer has attended to, which grows with each call."""

    def __init__(self):
        self.keys = {}

    def get_seq_length(self, layer_idx):
        return self.keys[layer_idx].shape[1] if layer_idx in self.keys else 0

    def update(self, keys, layer_idx):
        before = self.keys.get(layer_idx)
        self.keys[layer_idx] = keys if before is None else torch.cat([before, keys], 1)
        return self.keys[layer_idx]


class Attending(torch.nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx, self.keys = layer_idx, torch.nn.Linear(8, 8)

    def forward(self, x, past_key_values=None):
        keys = self.keys(x)
        keys = keys if past_key_values is None else past_key_values.update(keys, self.layer_idx)
        return x + F.scaled_dot_product_attention(x[None], keys[None], keys[None])[0]


class Language(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Attending(index) for index in range(3))

    def forward(self, x, prefix=None):
        cache = Cache()
        if prefix is not None:
            cache.keys[1] = prefix
        for layer in self.layers:
            x = layer(x, past_key_values=cache)
        return x, cache


class TwoCaches(Cache):
    """As transformers' EncoderDecoderCache."""

    def __init__(self):
        self.self_attention_cache, self.cross_attention_cache = Cache(), Cache()
        self.is_updated = {1: True}


def test_a_cache_of_encoder_and_decoder_is_two_caches(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    both = TwoCaches()
    own, others = torch.ones(1, 2, 8), torch.ones(1, 3, 8)
    both.self_attention_cache.update(own, 1)
    both.cross_attention_cache.update(others, 1)
    both.cross_attention_cache.update(torch.ones(1, 4, 8), 0)

    assert [id(tensor) for tensor in tensors_of(both, 1)] == [id(own), id(others)]


def test_recomputed_units_leave_a_cache_of_keys_that_is_empty(monkeypatch):
    """It would keep what recomputing them is to free. One that holds something of the unit is used."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    gradients, kept = [], []
    for policy in ("none", "every-layer"):
        torch.manual_seed(0)
        model, x = Language(), torch.randn(2, 5, 8)
        with applied(make_plan(1, policy=policy)):
            output, cache = model(x)
            output.square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
            kept.append(sorted(cache.keys))
            if policy != "none":
                assert sorted(model(x, prefix=torch.ones(2, 1, 8))[1].keys) == [1]
    assert kept == [[0, 1, 2], []]
    assert all(map(torch.equal, *gradients))


def test_keys_that_were_left_out_cannot_be_carried_into_the_next_forward(monkeypatch):
    """The script would train on, and attend to less than it says."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    model, x = Language(), torch.randn(2, 5, 8)
    with applied(make_plan(1, policy="every-layer")):
        _, cache = model(x)
        with pytest.raises(PlanError, match="keys and values of an earlier one"):
            model.layers[0](x, past_key_values=cache)


def test_a_second_run_finds_a_trained_prefix_as_the_first_did(monkeypatch):
    """Where the unit has added its keys, it would attend to them twice."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    gradients = []
    for policy in ("none", "every-layer"):
        torch.manual_seed(0)
        model, x, prefix = Language(), torch.randn(2, 5, 8), torch.randn(2, 1, 8, requires_grad=True)
        with applied(make_plan(1, policy=policy)):
            output, cache = model(x, prefix=prefix)
            output.square().sum().backward()
            gradients.append([each.grad.clone() for each in (prefix, *model.parameters())])
            assert cache.keys[1].shape[1] == 6
    assert all(map(torch.equal, *gradients))


def test_what_is_kept_for_a_second_run_holds_no_other_layers_keys(monkeypatch):
    """The cache itself would keep every layer's until the first one's backward."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    model, x = Language(), torch.randn(2, 5, 8)
    with applied(make_plan(1, policy="every-layer")):
        output, cache = model(x, prefix=torch.ones(2, 1, 8))
        keys = weakref.ref(cache.keys[1])
        del cache
        assert keys() is None
        output.sum().backward()


class Block(torch.nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.attention, self.after = Attending(layer_idx), torch.nn.Linear(8, 8)

    def forward(self, x, past_key_values=None):
        return x + self.after(self.attention(x, past_key_values=past_key_values))


class Deeper(Language):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(index) for index in range(3))


@pytest.mark.parametrize("has_prefix", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_part_that_runs_again_finds_a_cache_as_it_was(monkeypatch, recomputed, has_prefix):
    """It added its keys to the script's cache once more, and the backward ended in an error: T5, whose decoder keeps what it
    has attended to in training too."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    parted = tuple(
        UnitPlan(name=f"layers.{n}", zero_stage=0, recompute=recomputed, parts=((f"layers.{n}.attention",),))
        for n in range(3)
    )
    gradients, kept = [], []
    for plan in (make_plan(1, policy="none"), make_plan(1, policy="chosen", units=parted)):
        torch.manual_seed(0)
        model, x = Deeper(), torch.randn(2, 5, 8)
        prefix = torch.randn(2, 1, 8, requires_grad=True) if has_prefix else None
        with applied(plan):
            output, cache = model(x, prefix=prefix)
            output.square().sum().backward()
        gradients.append([each.grad.clone() for each in (*model.parameters(), *([prefix] * has_prefix))])
        kept.append({place: keys.shape[1] for place, keys in cache.keys.items()})
    assert all(map(torch.equal, *gradients))
    assert kept == [{0: 5, 1: 5 + has_prefix, 2: 5}, {1: 6} if has_prefix else {}]
