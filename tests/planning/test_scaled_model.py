"""Relatives of a model keep its proportions, and never shrink as they get deeper."""

import dataclasses
import itertools

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.planning.scaled_model import scaled_model

MODELS = ["gpt2-xl", "llama3-70b", "mixtral-8x7b", "deepseek-v3", "gemma-7b"]


def widths(model):
    parts = [model, model.experts, model.latent]
    names = ("hidden", "head_dim", "ffn", "expert_ffn", "shared_ffn", "kv_rank", "q_rank", "nope_head_dim")
    return [getattr(part, name) or 0 for part in parts for name in names if hasattr(part, name)]


@pytest.mark.parametrize("name", MODELS)
def test_twice_the_layers_are_twice_as_wide(name):
    model = load_architecture(name)
    twice = scaled_model(model, 2 * model.n_layers)
    assert widths(twice) == [2 * width for width in widths(model)]
    assert (twice.n_layers, twice.n_heads, twice.vocab) == (2 * model.n_layers, model.n_heads, model.vocab)
    assert scaled_model(twice, model.n_layers).num_parameters() == model.num_parameters()


@pytest.mark.parametrize("name", MODELS)
def test_nothing_shrinks_from_one_to_the_next(name):
    model = load_architecture(name)
    relatives = [scaled_model(model, layers) for layers in range(1, 2 * model.n_layers)]
    for smaller, larger in itertools.pairwise(relatives):
        assert all(few <= more for few, more in zip(widths(smaller), widths(larger), strict=True))
        assert smaller.num_parameters() < larger.num_parameters()
    assert dataclasses.asdict(relatives[model.n_layers - 1]) == dataclasses.asdict(model)


@pytest.mark.parametrize("name", MODELS)
def test_proportions_are_the_models_own_but_for_rounding(name):
    model = load_architecture(name)
    relative = scaled_model(model, 3 * model.n_layers // 4)
    share = relative.n_layers / model.n_layers
    assert relative.hidden / model.hidden == pytest.approx(share, rel=4.0 / relative.head_dim)
    assert relative.ffn / model.ffn == pytest.approx(share, rel=4.0 / relative.ffn)
    if model.hidden == model.n_heads * model.head_dim:
        assert relative.hidden == relative.n_heads * relative.head_dim
