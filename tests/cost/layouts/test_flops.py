"""Causal attention counted in full, and by half."""

from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.flops import halved_model_flops, model_flops
from memadvisor.layout import Layout, TrainingStep


def step_of(seq_len, target_len=None):
    return TrainingStep(layout=Layout(), seq_len=seq_len, target_len=target_len)


@pytest.mark.parametrize(
    ("name", "layers", "columns"), [("llama3-8b", 32, 4096), ("qwen3-next-80b-a3b", 12, 4096)]
)
def test_halving_takes_half_of_scores_and_of_their_products_with_values(name, layers, columns):
    """Of each layer that attends 2 products of s x s x columns, three times over with the backward."""
    model, step = load_architecture(name), step_of(65536)
    assert model_flops(model, step) - halved_model_flops(model, step) == pytest.approx(
        3 * layers * 4 * 65536**2 * columns / 2
    )


def test_an_encoder_has_nothing_to_halve():
    model = load_architecture("bert-base")
    assert halved_model_flops(model, step_of(512)) == model_flops(model, step_of(512))


def test_of_an_encoder_decoder_the_decoders_own_attention_is_halved():
    model, step = load_architecture("t5-base"), step_of(512, 128)
    difference = model_flops(model, step) - halved_model_flops(model, step)
    assert difference == pytest.approx(3 * 12 * 4 * 128**2 * 768 / 2)


def test_of_short_sequences_both_are_about_the_same():
    model = replace(load_architecture("llama3-70b"), n_layers=4)
    assert halved_model_flops(model, step_of(512)) == pytest.approx(
        model_flops(model, step_of(512)), rel=0.02
    )
