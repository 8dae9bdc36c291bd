"""Activations on the host, and what a layer's backward needs beside them."""

from dataclasses import replace

import pytest

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.chance import chance_of_more
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.memory import StageContents, stage_memory
from memadvisor.cost.layouts.saved import head_saved_bytes, layer_backward_bytes, layer_saved_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_dtypes import with_precision
from memadvisor.software_torch import FSDP
from memadvisor.software_traits import Software

LLAMA = Architecture(
    name="llama", n_layers=16, hidden=1024, n_heads=8, n_kv_heads=8, head_dim=128, ffn=2816, vocab=32000,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip
STAGE = StageContents(layers=(0, 1, 8, 9), embeddings=1, heads=0)
PIPELINE = TrainingStep(
    layout=Layout(pipeline=4, chunks=2, schedule="interleaved", num_microbatches=8), seq_len=2048
)


def held(step, in_flight, contents=STAGE):
    """Activations of so many microbatches of a chunk of two layers."""
    chunk = 2 * layer_saved_bytes(LLAMA, step, 0)
    return stage_memory(LLAMA, step, contents, in_flight * chunk, FITTED).activation_bytes / chunk


def offloading(share, step=PIPELINE):
    return replace(step, layout=replace(step.layout, offload_activations=share))


def test_the_share_on_the_host_is_of_what_does_not_move_or_compute():
    """A chunk in its forward, one on its way out, one on its way back, one in its backward: four stay."""
    assert held(offloading(0.0), 11) == pytest.approx(11)
    assert held(offloading(1.0), 11) == pytest.approx(4)
    assert held(offloading(0.5), 11) == pytest.approx(4 + 7 / 2)
    assert held(offloading(1.0), 3) == pytest.approx(3)


def test_without_a_pipeline_layers_move_one_by_one():
    alone = offloading(1.0, replace(PIPELINE, layout=Layout()))
    everything = StageContents(layers=tuple(range(16)), embeddings=1, heads=1)
    assert held(alone, 8, everything) == pytest.approx(2)  # four layers, in chunks of two


def test_a_backward_works_when_the_head_s_is_through():
    last = replace(STAGE, embeddings=0, heads=1)
    working = layer_backward_bytes(LLAMA, PIPELINE, STAGE.layers)
    logits = head_saved_bytes(LLAMA, PIPELINE)
    first_peak, last_peak = (stage_memory(LLAMA, PIPELINE, stage, 0.0, FITTED) for stage in (STAGE, last))
    assert first_peak.buffer_bytes == working > 0
    assert last_peak.head_bytes + last_peak.buffer_bytes == max(working, logits)


def test_a_layer_runs_again_when_the_head_is_through():
    last = replace(STAGE, embeddings=0, heads=1)
    again = replace(PIPELINE, layout=replace(PIPELINE.layout, recompute="full"))
    peak = stage_memory(LLAMA, again, last, 0.0, FITTED)
    layer = layer_saved_bytes(LLAMA, PIPELINE, 0) + layer_backward_bytes(LLAMA, again, STAGE.layers)
    assert peak.head_bytes + peak.buffer_bytes == pytest.approx(max(layer, head_saved_bytes(LLAMA, again)))


def test_logits_by_pieces_of_the_tokens():
    """Of 32000 columns at a width of 1024 there are 31.25 pieces."""
    pieces = replace(PIPELINE, software=Software(linear_loss=True))
    norm = 4.0 * PIPELINE.decoded_tokens * LLAMA.hidden
    whole, part = (head_saved_bytes(LLAMA, step) - norm for step in (PIPELINE, pieces))
    assert part == pytest.approx(whole / 31.25)


def test_outputs_in_a_variable_of_the_loop_keep_their_logits():
    """4 bytes of each of 32,000 logits of 2,048 tokens, beside those of the loss."""
    step = TrainingStep(layout=Layout(), seq_len=2048, software=Software())
    holding = replace(step, software=Software(held_logit_bytes=4.0))

    assert head_saved_bytes(LLAMA, holding) - head_saved_bytes(LLAMA, step) == 4 * 32_000 * 2048


def test_megatron_s_own_fusion_of_the_loss_has_its_softmax_in_fp32():
    """Two bytes of a logit, its fp32 copy, which becomes the softmax, and the gradient in two; a kernel in place has two alone."""
    logits = 32_000 * 2048

    def loss_bytes(**traits):
        step = TrainingStep(layout=Layout(), seq_len=2048, software=Software(**traits))
        return head_saved_bytes(LLAMA, step) - 4.0 * 2048 * LLAMA.hidden

    assert loss_bytes(fused_loss=True) == 2 * logits
    assert loss_bytes(fused_loss=True, compiled_loss=True) == 4 * logits
    assert loss_bytes(fused_loss=True, compiled_loss=True, returns_logits=True) == 6 * logits
    assert loss_bytes(fused_loss=True, wide_fused_loss=True) == 6 * logits
    assert loss_bytes(fused_loss=True, loss_in_place=True) == loss_bytes(loss_in_place=True) == 8 * logits


def test_fsdp_s_root_keeps_the_embedding_and_the_head_gathered():
    """Two matrices of 32,000 x 1024 in two bytes, whoever holds shards of them; not of what is not sharded."""

    def buffers(software, data):
        step = TrainingStep(layout=Layout(data=data, zero_stage=3), seq_len=2048, software=software)
        contents = StageContents(layers=tuple(range(16)), embeddings=1, heads=1)
        return stage_memory(LLAMA, step, contents, 0.0, FITTED).buffer_bytes

    own_units = replace(FSDP.software, keeps_ends=False)
    ends = 2 * 2 * 32_000 * 1024
    for data in (2, 8):
        assert buffers(FSDP.software, data) - buffers(own_units, data) == pytest.approx(ends)
    assert buffers(FSDP.software, 1) == buffers(own_units, 1)


def test_gradients_cast_for_the_update():
    """Of the share that a rank updates, under ZeRO stages 1 and 2."""
    held = []
    for size, stage in ((0, 1), (4, 1), (4, 3)):
        step = TrainingStep(
            layout=Layout(data=4, zero_stage=stage),
            seq_len=2048,
            software=Software(update_gradient_bytes=size),
        )
        held.append(stage_memory(LLAMA, step, STAGE, 0.0, FITTED))
    none, cast, sharded = held
    assert cast.buffer_bytes - none.buffer_bytes == pytest.approx(
        none.optimizer_bytes / 3
    )  # 12 bytes, all sharded
    assert sharded.optimizer_bytes == none.optimizer_bytes


def test_updates_over_lists_hold_one_more_of_each_parameter_when_activations_are_gone():
    """torch.optim's foreach; with the optimizer's state on the host it goes elsewhere."""
    listed = Software(parameter_bytes=4, updates_lists=True)
    for software, tokens, more in (
        (listed, 1, True),
        (Software(parameter_bytes=4), 1, False),
        (listed, 2**20, False),
    ):
        step = TrainingStep(layout=Layout(), seq_len=tokens, software=software)
        peak = stage_memory(LLAMA, step, STAGE, float(tokens) * 2**12, FITTED)
        if more:
            assert peak.activation_bytes + peak.head_bytes + peak.buffer_bytes == pytest.approx(
                peak.parameter_bytes, rel=1e-3
            )
        else:
            plain = stage_memory(
                LLAMA,
                replace(step, software=Software(parameter_bytes=4)),
                STAGE,
                float(tokens) * 2**12,
                FITTED,
            )
            assert peak == plain


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (Layout(), 0),
        (Layout(data=8), 1),
        (Layout(data=8, zero_stage=3, shard=4), 2),
        (Layout(data=2, tensor=2, pipeline=2), 3),
    ],
)
def test_each_communicator_has_buffers_beside_the_allocator_s(layout, groups):
    peak = stage_memory(LLAMA, replace(PIPELINE, layout=layout), STAGE, 0.0, FITTED)
    assert peak.context_bytes == FITTED.driver_bytes + groups * FITTED.communicator_bytes
    without = replace(peak, context_bytes=0.0)
    assert chance_of_more(peak, 80e9, FITTED) == chance_of_more(without, 80e9, FITTED)


@pytest.mark.parametrize("dtype, copies", [("bfloat16", 0.0), ("float8_e4m3fn", 2.0)])
def test_matrices_of_narrow_products_are_kept_as_they_were_cast_and_transposed(dtype, copies):
    """Of the layers' alone: embedding and head stay wide."""
    step = TrainingStep(
        layout=Layout(), seq_len=2048, software=Software(compute_dtype=dtype, narrow_copy_bytes=2.0)
    )
    contents = StageContents(layers=(0, 1), embeddings=1, heads=1)
    found, plain = (
        stage_memory(LLAMA, replace(step, software=software), contents, 0.0, FITTED).buffer_bytes
        for software in (step.software, Software(compute_dtype=dtype))
    )
    assert found - plain == pytest.approx(copies * 2 * (4 * 1024**2 + 3 * 1024 * 2816))


@pytest.mark.parametrize(("precision", "each"), [(None, 16.0), ("pure bf16", 8.0), ("fp32", 16.0)])
def test_fsdp_shards_the_master_copies_and_casts_them_in_its_gathers(precision, each):
    """torch/distributed/fsdp/flat_param.py frees the 16-bit shard behind each gather; DeepSpeed keeps one beside the master copy."""
    software = FSDP.software if precision is None else with_precision(FSDP.software, precision)
    layout = Layout(data=8, zero_stage=3, num_microbatches=2)
    step = TrainingStep(layout=layout, seq_len=2048, software=software)
    everything = StageContents(layers=tuple(range(16)), embeddings=1, heads=1)
    memory = stage_memory(LLAMA, step, everything, 0.0, FITTED)

    assert memory.states_bytes == pytest.approx(each * LLAMA.num_parameters() / 8, rel=1e-4)


def test_stages_below_the_third_compute_with_whole_parameters_in_two_bytes():
    layout = Layout(data=8, zero_stage=2, num_microbatches=2)
    step = TrainingStep(layout=layout, seq_len=2048, software=FSDP.software)
    everything = StageContents(layers=tuple(range(16)), embeddings=1, heads=1)
    memory = stage_memory(LLAMA, step, everything, 0.0, FITTED)

    assert memory.states_bytes == pytest.approx((2 + 16 / 8) * LLAMA.num_parameters(), rel=1e-4)
