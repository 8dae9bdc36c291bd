"""What choosing the keys that attention sees costs (DeepSeek sparse attention)."""

from dataclasses import replace

import pytest

from memadvisor.architecture import Architecture, LatentAttention
from memadvisor.cost.layouts.attention import attention_seconds
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.flops import model_flops
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.key_index import index_products
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep

LATENT = LatentAttention(kv_rank=512, q_rank=1536, rope_head_dim=64, nope_head_dim=128, value_head_dim=128)
DENSE = Architecture(
    name="dense", n_layers=2, hidden=7168, n_heads=128, n_kv_heads=128, head_dim=192, ffn=18432, vocab=1000,
    tied_embeddings=False, gated_mlp=True, latent=LATENT,
)  # fmt: skip
# As DeepSeek-V3.2's: 64 heads of 128 columns choose 2048 keys.
SPARSE = replace(DENSE, latent=replace(LATENT, index_heads=64, index_head_dim=128), window=2048)


def step_of(seq_len):
    return TrainingStep(layout=Layout(), seq_len=seq_len)


def seconds(model, seq_len):
    device = device_of(parse_cluster("1xH100").accelerator, "bfloat16", FITTED)
    return attention_seconds(model, step_of(seq_len), 0, device)


def test_a_sequence_that_is_chosen_whole_takes_the_index_besides():
    dense, sparse = seconds(DENSE, 2048), seconds(SPARSE, 2048)

    assert sparse[0] > dense[0]
    assert sparse[1] == dense[1]


def test_a_long_sequence_takes_less():
    """Of 65,536 keys 2048 are seen, and all are scored, by 8192 columns where attention has 40,960."""
    dense, sparse = seconds(DENSE, 65536), seconds(SPARSE, 65536)

    assert sum(sparse) < 0.5 * sum(dense)


def test_scores_are_counted_once():
    """Forward and backward are three of attention's pairs, 320 columns of 128 heads; the index has a forward alone."""
    seq_len = 8192
    step = step_of(seq_len)
    pairs = 3 * 2 * 2.0 * seq_len * 128 * 320
    index = 2 * 2.0 * seq_len * 64 * 128 * seq_len
    added = 2 * SPARSE.latent.index_parameters(7168)

    assert model_flops(SPARSE, step) - model_flops(DENSE, step) == pytest.approx(
        index - pairs * (seq_len - 2048) + 3 * 2.0 * seq_len * added
    )


def test_its_products_are_its_matrices():
    products = sum(columns * depth * count for _, columns, depth, count in index_products(SPARSE, 4096))

    assert SPARSE.latent.index_parameters(7168) == products + 2 * 128
    assert index_products(DENSE, 4096) == []
