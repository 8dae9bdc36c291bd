"""Parameters of recurrences, counted by hand."""

import pytest

from memadvisor.architecture import Architecture
from memadvisor.recurrence import Recurrence

DELTA = Recurrence(kind="gated_delta_net", n_heads=4, head_dim=8, n_key_heads=2, state_dim=6, norm=8)
MAMBA2 = Recurrence(
    kind="mamba2", n_heads=4, head_dim=8, n_key_heads=2, state_dim=6, convolution_bias=True, norm=32
)
MAMBA = Recurrence(kind="mamba", n_heads=32, head_dim=1, state_dim=6, convolution_bias=True, step_rank=3)


def test_a_delta_net_makes_queries_keys_values_gate_and_two_numbers_a_head():
    assert DELTA.in_columns == 12 + 12 + 32 + 32 + 2 * 4
    # Two products, a convolution over queries, keys and values of four tokens, two numbers of each head, a norm of one head.
    assert DELTA.num_parameters(16) == 16 * 96 + 32 * 16 + 4 * 56 + 2 * 4 + 8


def test_mamba2_makes_gate_values_b_c_and_a_step_a_head():
    assert MAMBA2.in_columns == 32 + 32 + 12 + 12 + 4
    assert MAMBA2.num_parameters(16) == 16 * 92 + 32 * 16 + (4 + 1) * 56 + 3 * 4 + 32


def test_mamba_makes_its_steps_out_of_what_was_convolved():
    assert (MAMBA.in_columns, MAMBA.step_columns) == (64, 3 + 12)
    products = 16 * 64 + 32 * 15 + 3 * 32 + 32 * 16
    assert MAMBA.num_parameters(16) == products + (4 + 1) * 32 + 32 * 6 + 2 * 32


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [("ra", (2, 2, 4)), ("R", (0, 4, 0)), ("RFA", (1, 2, 1)), ("b", (4, 4, 4))],
)
def test_each_layer_has_the_parts_that_its_letter_names(pattern, parts):
    model = Architecture(
        name="x", n_layers=4, hidden=16, n_heads=2, n_kv_heads=1, head_dim=8, ffn=24, vocab=10, tied_embeddings=True,
        gated_mlp=True, layer_pattern=pattern, recurrence=DELTA,
    )  # fmt: skip
    attention, recurrences, blocks = parts
    norms = 4 if pattern in ("R", "RFA") else 8
    # Queries, keys, values, output: 16 x (16 + 8 + 8) and 16 x 16.
    counted = attention * 768 + recurrences * DELTA.num_parameters(16) + blocks * 3 * 16 * 24 + norms * 16

    assert sum(model.layer_parameters(layer) for layer in range(4)) == counted
    assert model.num_parameters() == counted + 10 * 16 + 16
