"""Model FLOPs of four kinds of models in four conventions, each against the formula filled in by hand."""

import dataclasses

import pytest
import torch

from memadvisor.analyzers.step_time import step_time
from memadvisor.analyzers.utilization import utilization
from memadvisor.hardware.hardware import Hardware
from tests.analyzers.measured_models import (
    BATCH,
    HEADS,
    LAYERS,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Gpt,
    Mlp,
    profiled,
    run_of,
)
from tests.make_run import make_run

CAUSAL_PAIRS = BATCH * HEADS * SEQUENCE * (SEQUENCE + 1) // 2
ALL_PAIRS = BATCH * HEADS * SEQUENCE**2
HEAD = WIDTH // HEADS


def result_of(run, hardware=None):
    rank = run.ranks[0]
    return utilization(rank, step_time(rank), hardware)


def flops_of(run):
    return {name: found.flops_per_step for name, found in result_of(run).conventions.items()}


def exact_attention(pairs):
    """Two products forward and four backward, 2 FLOPs an element of the heads and pair."""
    return LAYERS * 6 * 2 * pairs * HEAD


NORMS = LAYERS * 2 * WIDTH
TABLES = (VOCABULARY + SEQUENCE) * WIDTH
SQUARE = 12 * LAYERS * WIDTH * SEQUENCE  # 12 L H Q T of PaLM, and the same of torchtitan


@pytest.mark.parametrize("kind", ["gpt", "written out"])
def test_a_gpt_in_all_four(kind):
    """Attention that the script writes out multiplies whole squares; the formulas cannot tell."""
    matrices = LAYERS * 12 * WIDTH**2
    head = VOCABULARY * WIDTH
    num_parameters = matrices + head + NORMS + TABLES

    flops = flops_of(run_of(kind))

    pairs = CAUSAL_PAIRS if kind == "gpt" else ALL_PAIRS
    assert flops["exact"] == 6 * TOKENS * (matrices + head) + exact_attention(pairs)
    assert flops["palm"] == TOKENS * (6 * num_parameters + SQUARE)
    assert flops["torchtitan"] == TOKENS * (6 * (num_parameters - TABLES) + SQUARE)
    assert flops["megatron"] == megatron(key_heads=HEADS, hidden=4 * WIDTH, expansion=2)


def megatron(*, key_heads, hidden, expansion, experts_a_token=1):
    """`transformer_flops` of Megatron-LM's num_floating_point_operations, with its own variables."""
    query_projection, key_projection = HEAD * HEADS, HEAD * key_heads
    attention = 6 * (
        WIDTH * (query_projection + 2 * key_projection)
        + query_projection * SEQUENCE / 2 * 2
        + query_projection * WIDTH
    )
    mlp = 6 * WIDTH * hidden * expansion * experts_a_token
    logits = 6 * WIDTH * VOCABULARY
    return BATCH * SEQUENCE * (LAYERS * (attention + mlp) + logits)


def test_grouped_queries_a_gated_mlp_and_tied_embeddings():
    """The tied table is multiplied by, so that torchtitan counts it; only positions are looked up alone."""
    key_heads, hidden = 2, 80
    matrices = LAYERS * (WIDTH * HEAD * (HEADS + 2 * key_heads) + WIDTH**2 + 3 * WIDTH * hidden)
    head = VOCABULARY * WIDTH

    flops = flops_of(run_of("grouped"))

    assert flops["exact"] == 6 * TOKENS * (matrices + head) + exact_attention(CAUSAL_PAIRS)
    assert flops["palm"] == TOKENS * (6 * (matrices + head + NORMS + SEQUENCE * WIDTH) + SQUARE)
    assert flops["torchtitan"] == TOKENS * (6 * (matrices + head + NORMS) + SQUARE)
    assert flops["megatron"] == megatron(key_heads=key_heads, hidden=hidden, expansion=3)


def test_a_mixture_of_experts_counts_the_active_ones():
    """2 of 4 experts for each token, whichever the router chose; Megatron leaves the router out."""
    attention = LAYERS * 4 * WIDTH**2
    router, one_expert, head = LAYERS * 4 * WIDTH, LAYERS * 4 * WIDTH**2, VOCABULARY * WIDTH
    active = attention + router + 2 * one_expert + head

    flops = flops_of(run_of("moe"))

    assert flops["exact"] == 6 * TOKENS * active + exact_attention(CAUSAL_PAIRS)
    assert flops["palm"] is None
    assert flops["torchtitan"] == TOKENS * (6 * (active + NORMS) + SQUARE)
    assert flops["megatron"] == megatron(key_heads=HEADS, hidden=2 * WIDTH, expansion=2, experts_a_token=2)
    shape = result_of(run_of("moe")).shape
    assert (shape.num_experts, shape.num_active_experts) == (4, 2)


def convolution(channels, filters, kernel, positions):
    return 2 * BATCH * positions * channels * filters * kernel**2


def test_a_resnet_is_known_to_the_exact_convention_alone():
    """Every convolution three times, but the first: nobody asks for the gradient of the images."""
    stem = convolution(3, 16, 7, 16 * 16)
    first = (
        convolution(16, 8, 1, 64) + convolution(8, 8, 3, 64) + convolution(8, 32, 1, 64) + convolution(16, 32, 1, 64)
    )  # fmt: skip
    second = (
        convolution(32, 16, 1, 64) + convolution(16, 16, 3, 16) + convolution(16, 64, 1, 16) + convolution(32, 64, 1, 16)
    )  # fmt: skip
    head = 2 * BATCH * 64 * 10

    result = result_of(run_of("resnet"))

    assert result.model_flops_per_step == 2 * stem + 3 * (first + second + head)
    assert result.executed_flops_per_step == result.model_flops_per_step
    for name in ("palm", "torchtitan", "megatron"):
        assert result.conventions[name].flops_per_step is None
        assert "token" in result.conventions[name].reason


def test_an_lstm_is_known_to_the_exact_convention_alone():
    """Four gates of both products, three times, less the gradient of the first hidden state."""
    hidden = 24
    layers = sum(3 * 2 * TOKENS * 4 * hidden * (width + hidden) for width in (WIDTH, hidden))
    first_states = 2 * (2 * BATCH * 4 * hidden * hidden)
    head = 3 * 2 * TOKENS * hidden * VOCABULARY

    result = result_of(run_of("lstm"))

    assert result.model_flops_per_step == layers - first_states + head
    assert result.executed_flops_per_step == layers + head
    assert "rnn" in result.conventions["palm"].reason


def test_accumulation_multiplies_and_evaluation_adds_nothing():
    def evaluate(model):
        with torch.no_grad():
            model(model.batch())

    plain = result_of(run_of("gpt"))
    accumulated = result_of(profiled(Gpt(), num_micro_batches=3, between=evaluate))

    for name, found in accumulated.conventions.items():
        assert found.flops_per_step == 3 * plain.conventions[name].flops_per_step
    assert accumulated.executed_flops_per_step == 3 * plain.executed_flops_per_step


@pytest.mark.parametrize("style", ["fused", "written out"])
def test_recomputation_changes_what_is_executed_alone(style):
    plain = result_of(run_of("gpt" if style == "fused" else style))
    model = Gpt(style)
    model.recompute = True
    recomputed = result_of(profiled(model))

    assert recomputed.conventions == plain.conventions
    assert recomputed.executed_flops_per_step > plain.executed_flops_per_step


def test_the_formulas_take_no_frozen_parameters():
    model = Gpt()
    model.blocks[0].requires_grad_(False)
    result = result_of(profiled(model))

    assert result.conventions["exact"].flops_per_step < result_of(run_of("gpt")).model_flops_per_step
    assert all("frozen" in result.conventions[name].reason for name in ("palm", "torchtitan", "megatron"))


def test_a_weight_that_is_used_twice_a_token_is_not_guessed_at():
    model = Gpt(make_mlp=lambda: torch.nn.Sequential(*[Mlp(2 * WIDTH)] * 2))

    assert "rows" in result_of(profiled(model)).conventions["megatron"].reason


def test_the_mfu_of_each_convention_is_its_flops_by_time_by_peak():
    hardware = Hardware(
        name="a machine",
        kind="given",
        source="a test",
        memory_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        peak_flops_per_s={"float32": 1e10},
    )
    result = result_of(make_run(num_ranks=1), hardware)

    for found in result.conventions.values():
        assert found.mfu == pytest.approx(found.flops_per_step / 0.1 / 1e10)
    assert result.conventions["exact"].mfu == result.mfu
    assert result.conventions["palm"].mfu == result.mfu_palm
    assert all(found.mfu is None for found in result_of(make_run(num_ranks=1)).conventions.values())


@pytest.mark.parametrize(
    "text", ["[[1", "7", "[[1, 2], 3]", "[[0, 1], [1, 2]]", '[["a"]]', "[[null, 2], [2, 3]]"]
)
def test_damaged_shapes_are_a_reason_and_no_traceback(text):
    rank = make_run(num_ranks=1).ranks[0]
    rows = tuple(dataclasses.replace(row, shapes=text if row.shapes else None) for row in rank.operators)
    broken = dataclasses.replace(rank, operators=rows)

    found = utilization(broken, None, None).conventions["palm"]

    assert found.flops_per_step is None
    assert found.reason
