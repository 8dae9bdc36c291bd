"""Bytes per layer against Korthikanti et al. 2022 (arXiv:2205.05198), table 2 and equations 1 to 6."""

from dataclasses import replace

import pytest
import torch

from memadvisor.architecture import Architecture, Experts
from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.saved import (
    head_saved_bytes,
    layer_backward_bytes,
    layer_saved_bytes,
    layer_weight_input_bytes,
)
from memadvisor.cost.layouts.second_run import second_run_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import find_preset
from memadvisor.software_traits import Software

S, B, H, A = 2048, 4, 6144, 64
GPT = Architecture(
    name="22B", n_layers=48, hidden=H, n_heads=A, n_kv_heads=A, head_dim=H // A, ffn=4 * H, vocab=51200,
    tied_embeddings=True, gated_mlp=False, positions=S, biases=True, norm_vectors=2,
)  # fmt: skip
MEGATRON = Software(fused_attention=False, dropout=True)
SBH = S * B * H


def saved(**layout):
    step = TrainingStep(layout=Layout(micro_batch_size=B, **layout), seq_len=S, software=MEGATRON)
    return layer_saved_bytes(GPT, step, 0)


def test_without_parallelism_a_layer_keeps_34_sbh_and_5_a_s_s_b():
    assert saved() == pytest.approx(SBH * (34 + 5 * A * S / H))


def test_in_fp32_all_but_masks_has_twice_the_bytes():
    """Three masks of a byte: of both residual dropouts, and of the one of scores."""
    code = replace(MEGATRON, compute_dtype="float32")
    step = TrainingStep(layout=Layout(micro_batch_size=B), seq_len=S, software=code)
    assert layer_saved_bytes(GPT, step, 0) == pytest.approx(SBH * (2 * 32 + 2 + (2 * 4 + 1) * A * S / H))
    autocast = replace(step, software=replace(code, compute_dtype="float16", autocast=True))
    assert autocast.software.element_bytes == 2


def test_tensor_parallelism_leaves_10_sbh_whole():
    assert saved(tensor=8) == pytest.approx(SBH * (10 + 24 / 8 + 5 * A * S / H / 8))


def test_sequence_parallelism_divides_all_of_it():
    assert saved(tensor=8, sequence_parallel=True) == pytest.approx(SBH / 8 * (34 + 5 * A * S / H))


@pytest.mark.parametrize("code", [Software(), Software(fused_rotary=False, repeats_keys=True)])
def test_norms_of_queries_and_keys_keep_what_the_products_gave_them(code):
    """Qwen3's: the rotated results are kept for attention, their inputs for the norms' backward; keys once, of their own heads."""
    model = load_architecture("qwen3-8b")
    step = TrainingStep(layout=Layout(tensor=2), seq_len=S, software=code)

    more = layer_saved_bytes(model, step, 0) - layer_saved_bytes(replace(model, qk_norm=0), step, 0)
    assert more == 2 * S * (32 + 8) * 128 / 2


def test_liger_leaves_no_copy_of_what_it_rotates():
    """Queries, keys and values once, as where their rotation is fused."""
    rotated = replace(GPT, positions=0)
    step = TrainingStep(layout=Layout(), seq_len=S, software=Software(fused_rotary=False))
    liger, fused = (
        layer_saved_bytes(rotated, replace(step, software=replace(step.software, **traits)), 0)
        for traits in ({"liger": True}, {"fused_rotary": True})
    )
    assert liger == fused < layer_saved_bytes(rotated, step, 0)


def test_selective_recomputation_drops_the_scores():
    kept = saved(tensor=8, sequence_parallel=True, recompute="selective")
    assert kept == pytest.approx(SBH / 8 * 34)


def test_full_recomputation_keeps_the_input():
    assert saved(tensor=8, recompute="full") == 2 * SBH


def test_unfused_pointwise_kernels_keep_the_gate_s_result_and_copies_of_queries_keys_and_values():
    gated = replace(GPT, gated_mlp=True)
    step = TrainingStep(layout=Layout(micro_batch_size=B), seq_len=S, software=MEGATRON)
    unfused = replace(step, software=replace(MEGATRON, fused_mlp=False, fused_rotary=False))
    more = layer_saved_bytes(gated, unfused, 0) - layer_saved_bytes(gated, step, 0)
    assert more == S * B * (2 * GPT.ffn + 3 * 2 * H)


def test_pointwise_recomputation_keeps_the_inputs_of_norms_and_of_the_activation():
    """Of a Llama's 2 norms, 3 inputs of attention, its result, and 4 columns of an unfused gate, each of two bytes."""
    llama = replace(GPT, gated_mlp=True, ffn=16384)
    code = Software(fused_mlp=False)
    step = TrainingStep(layout=Layout(micro_batch_size=B), seq_len=S, software=code)
    again = replace(step, layout=replace(step.layout, recompute="pointwise"))
    lse = 4 * A * S * B
    assert layer_saved_bytes(llama, step, 0) == 2 * S * B * (8 * H + 4 * 16384) + lse
    assert layer_saved_bytes(llama, again, 0) == 2 * S * B * (6 * H + 2 * 16384) + lse


def test_a_layer_s_backward_holds_the_gradients_of_its_widest_product():
    held = layer_backward_bytes(
        GPT, TrainingStep(layout=Layout(micro_batch_size=B, tensor=8), seq_len=S), (0,)
    )
    assert held == 2 * (S * B * 4 * H / 8 + H * 4 * H / 8 + S * B * H)


def test_a_cross_entropy_of_16_bit_logits_holds_four_tensors_of_their_size():
    """Logits, log-softmax, its gradient and theirs: 8 bytes of each, as the peak of F.cross_entropy's storages is."""
    step = TrainingStep(layout=Layout(micro_batch_size=B), seq_len=S, software=Software(loss_bytes=2))
    assert head_saved_bytes(GPT, step) == S * B * (8 * 51200 + 4 * H)


def test_a_split_backward_keeps_inputs_and_gradients_of_results():
    """Of a GPT 32 s b h bytes a layer (Qi et al. 2023, arXiv:2401.10241, section 3): 14 of inputs and 18 of gradients."""
    step = TrainingStep(layout=Layout(micro_batch_size=2), seq_len=128)
    assert layer_weight_input_bytes(GPT, step, 0) == 32 * 128 * 2 * GPT.hidden


@pytest.mark.parametrize("norms, kept", [(1, 2 + 2), (2, 4 + 4), (4, 8 + 4)])
def test_norms_keep_their_inputs_and_those_before_products_their_results(norms, kept):
    """One norm for attention and the MLP side by side (GPT-J), one before each, and one behind each too (Gemma 2)."""
    model = replace(GPT, norms_per_layer=norms)
    step = TrainingStep(layout=Layout(micro_batch_size=B), seq_len=S)
    inside = S * B * (2 * 4 * H + 4 * A + 4 * GPT.ffn)
    assert layer_saved_bytes(model, step, 0) == kept * SBH + inside


def test_a_layer_whose_scores_are_computed_again_holds_them_for_its_backward():
    """So less is never held by running the whole layer again (arXiv:2205.05198, section 5: one layer at a time)."""
    none, again = (
        TrainingStep(layout=Layout(micro_batch_size=B, recompute=how), seq_len=S, software=MEGATRON)
        for how in ("none", "selective")
    )
    assert second_run_bytes(GPT, none, (0,)) == 0
    assert second_run_bytes(GPT, again, (0,)) == 5 * A * S * S * B


@pytest.mark.parametrize(
    "dtype, narrow", [("bfloat16", 2.0), ("float8_e4m3fn", 1.0), ("float4_e2m1fn_x2", 0.5625)]
)
def test_products_of_transformer_engine_keep_their_inputs_as_they_were_cast(dtype, narrow):
    """Of a Llama's layer: both norms' inputs and, narrow, results; queries, keys, values; the result of attention, which
    its kernel keeps in two bytes and, where it is cast, the product beside it; the gate's two inputs, and its result,
    narrow."""
    model = replace(GPT, gated_mlp=True)
    software = Software(compute_dtype=dtype, saves_narrow=True)
    step = TrainingStep(layout=Layout(micro_batch_size=B), seq_len=S, software=software)
    columns = 2 * (2 + narrow) * H + 3 * 2 * H + 2 * H + 4 * GPT.ffn + narrow * GPT.ffn
    cast = narrow * H if narrow < 2 else 0
    assert layer_saved_bytes(model, step, 0) == pytest.approx(S * B * (columns + cast + 4 * A))


@pytest.mark.parametrize("weighs_inside", [False, True])
def test_results_of_experts_are_kept_for_their_weights_alone(weighs_inside):
    model = replace(GPT, experts=Experts(num_experts=8, experts_per_token=2, expert_ffn=H))
    step = TrainingStep(
        layout=Layout(micro_batch_size=B), seq_len=S, software=Software(weighs_inside=weighs_inside)
    )
    other = replace(step, software=Software(weighs_inside=True))
    more = layer_saved_bytes(model, step, 0) - layer_saved_bytes(model, other, 0)
    assert more == (0 if weighs_inside else S * B * 2 * 2 * H)


def a_layer_of_experts(num_tensor=1, **traits):
    experts = Experts(num_experts=8, experts_per_token=2, expert_ffn=H)
    model = replace(GPT, gated_mlp=True, ffn=H // 4, experts=experts)
    layout = Layout(micro_batch_size=B, tensor=num_tensor)
    return model, TrainingStep(layout=layout, seq_len=S, software=Software(**traits))


def test_what_is_weighed_in_fp32_is_kept_in_fp32():
    """torchtitan, torchtitan/models/moe.py: (routed_output.to(float32) * top_scores).to(x.dtype); by autograd too."""
    kept = [layer_saved_bytes(*a_layer_of_experts(weighs_wide=wide), 0) for wide in (False, True)]
    assert kept[1] - kept[0] == S * B * 2 * 2 * H

    sizes = []
    results = torch.ones(2 * S, H, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.ones(2 * S, 1, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: sizes.append(one.nbytes), lambda one: one):
        (results.to(torch.float32) * scores).to(torch.bfloat16)
    assert sorted(sizes) == [4 * 2 * S, 4 * 2 * S * H]


def test_the_backward_of_experts_has_gradients_of_all_tokens_that_pass_them():
    """Of a token and expert those of the gate's two products and of what came in, and of all experts' weights of these, unless
    products add to what is accumulated; where results are weighed in fp32 their gradient, and its products with the scores
    and the results, each of four bytes."""
    routed = 2 * S * B
    weights = 2 * 8 * 2 * H * H
    assert layer_backward_bytes(*a_layer_of_experts(), (0,)) == 2 * routed * (2 * H + H) + weights
    adds = {"fused_accumulation": True}
    assert layer_backward_bytes(*a_layer_of_experts(**adds), (0,)) == 2 * routed * (2 * H + H)
    wide = {**adds, "weighs_wide": True}
    assert layer_backward_bytes(*a_layer_of_experts(**wide), (0,)) == 12 * routed * H
    inside = {"weighs_wide": True, "weighs_inside": True}
    assert layer_backward_bytes(*a_layer_of_experts(**inside), (0,)) == 2 * routed * (2 * H + H) + weights


def test_hugging_face_s_classes_weigh_experts_in_two_bytes():
    assert not Software(weighs_wide=True, reference_code=True).weighs_experts_wide
    assert find_preset("torchtitan").software.weighs_experts_wide


def test_deepseek_s_own_training_keeps_a_token_s_ranks_and_what_experts_were_given():
    """arXiv:2412.19437, sections 3.2.3 and 3.3.3: of a layer the inputs of both norms, latent ranks, attention's result
    once in 12 bits and its sums, the router's scores, a byte of each expert's input and of each column before its
    gate."""
    model = load_architecture("deepseek-v3")
    step = TrainingStep(
        layout=Layout(recompute="pointwise"),
        seq_len=S,
        software=replace(find_preset("HAI-LLM").software, compute_dtype="float8_e4m3fn"),
    )
    h, heads, inner = 7168, 128, 2048
    kept = (
        2 * 2 * h
        + 2 * (1536 + 512)
        + 1.5 * heads * 128
        + 4 * heads
        + 8 * (h + 2 * inner)
        + 2 * inner
        + 4 * 256
    )
    assert layer_saved_bytes(model, step, 60) == pytest.approx(S * kept)
