"""Bytes of activations that autograd keeps of one microbatch, from what each operator saves; elements have two bytes,
and in the end as many times that as they are in fp32.

Counted operator by operator as in Korthikanti et al. 2022 (arXiv:2205.05198), section 4.1, whose 34 s b h + 5 a s^2 b of a
GPT with dropout follows from it, and with rotary positions, gated feed-forward blocks and grouped heads besides.
"""

from __future__ import annotations

from dataclasses import replace

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.adapters import frozen_inputs_bytes, input_bytes, layer_matrices
from memadvisor.cost.layouts.operators import operators_saved_bytes
from memadvisor.cost.layouts.recurrences import recurrence_saved_bytes
from memadvisor.cost.layouts.saved_autocast import (
    encoder_copies_bytes,
    fp32_column_bytes,
    fp32_norm_bytes,
    stream_bytes,
)
from memadvisor.cost.layouts.saved_reference import (
    ffn_column_bytes,
    head_norm_bytes,
    residual_bytes,
    score_bytes,
)
from memadvisor.layout import TrainingStep
from memadvisor.software_traits import Software

# Of one logit at the peak: the product in two bytes, its float32 copy, whose softmax is made beside it, and the gradient
# in two.
LOGIT_BYTES = 12.0
# Where the cross entropy takes them as they are: the product, its log-softmax, the gradient of that, and its own, in two bytes.
_NARROW_LOGIT_BYTES = 8.0
# Where the softmax takes the copy's place: the product in two bytes, the copy, and the gradient in two
# (megatron/core/tensor_parallel/cross_entropy.py).
_IN_PLACE_LOGIT_BYTES = 8.0
# Where one kernel makes the gradient of the logits in their place; where torch.compile's writes it beside them, for what came into
# a compiled forward is not its backward's to write; and where it takes a copy in fp32, whose gradient is cast back (Liger's in the
# loss of Hugging Face's classes, transformers/loss/loss_utils.py, ForCausalLMLoss).
_FUSED_LOGIT_BYTES, _COMPILED_LOGIT_BYTES, _WIDE_FUSED_LOGIT_BYTES = 2.0, 4.0, 6.0
# A forward that is compiled with its loss and returns the logits too is given their gradient: zeros, which autograd makes.
_RETURNED_LOGIT_BYTES = 2.0


def plain_saved_bytes(model: Architecture, step: TrainingStep, layer: int) -> float:
    """The same where nothing of it runs again."""
    return layer_saved_bytes(model, replace(step, layout=replace(step.layout, recompute="none")), layer)


def layer_saved_bytes(model: Architecture, step: TrainingStep, layer: int) -> float:
    """What one layer keeps of one microbatch on one rank until its backward; where some layers run again, their mean."""
    layout, tokens = step.layout, layer_tokens(model, step, layer)
    if layout.recompute == "full":
        inputs = (
            (4.0 if step.software.autocast else step.software.element_bytes)
            * tokens
            * model.hidden
            / layout.stream_ranks
        )
        share = layout.recompute_share
        return inputs if share == 1 else share * inputs + (1 - share) * plain_saved_bytes(model, step, layer)
    if step.repeats_operators:
        kept = operators_saved_bytes(model, step, layer, tokens)
    else:
        kept = _all_trained_bytes(model, step, layer, tokens)
    frozen = frozen_inputs_bytes(model, step, layer, tokens)
    kept = max(0.0, kept - frozen) + input_bytes(model, step, layer, tokens)
    return kept * _wide(step)


def _wide(step: TrainingStep) -> float:
    """How many times two bytes an element of activations has. What has one byte, or four in any case, is counted as the part of it."""
    return step.software.element_bytes / 2


def _all_trained_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """Where each matrix of the layer is trained and nothing of it runs again as a whole."""
    layout, software = step.layout, step.software
    tp, hidden, spread = layout.tensor, model.hidden, layout.stream_ranks
    crosses = model.has_cross_attention(layer)
    inside = _ffn_bytes(model, step, layer, tokens)
    if model.has_attention(layer):
        inside += _attention_bytes(model, step, tokens, tokens)
    if crosses:
        inside += _attention_bytes(model, step, tokens, step.microbatch_tokens)
    inside = inside / tp + recurrence_saved_bytes(model, step, layer, tokens)
    norms, sublayers = model.num_norms(layer), model.num_sublayers(layer)
    if software.autocast and crosses:
        inside += step.microbatch_tokens * hidden * encoder_copies_bytes(software) / spread
    if software.reference_code:
        if software.autocast:
            return tokens * hidden * stream_bytes(model, layer) / spread + inside
        return tokens * hidden * residual_bytes(model, norms, sublayers, wide=_wide(step)) / spread + inside
    # Input of each norm; result of each that products follow, which is their input and may be computed again (norms behind a
    # block's products have sums after them, which keep nothing); the masks of the dropouts after each block.
    inputs = (4.0 if software.autocast else 2.0) * norms
    results = (
        0.0 if layout.recompute == "pointwise" else _norm_results_bytes(model, step, layer, norms, sublayers)
    )
    behind = sublayers * ((1.0 / _wide(step) if software.dropout else 0.0) + 2.0 * model.scales_parts)
    outside = tokens * hidden * (inputs + results + behind) / spread
    return outside + inside


def _norm_results_bytes(
    model: Architecture, step: TrainingStep, layer: int, norms: int, sublayers: int
) -> float:
    """Of an element of the stream, the results of norms that products read; a router's product is of 16 bits."""
    inputs, is_routed = min(norms, sublayers), model.experts is not None and model.has_experts(layer)
    return 2.0 * is_routed + step.software.saved_input_bytes * (inputs - is_routed)


# A norm that keeps so much of an element of 16 bits has copied it to fp32 (ReferenceCode.norm_bytes).
_NORM_BYTES_WITH_COPY = 8.0


def copies_input(model: Architecture, step: TrainingStep) -> bool:
    """Whether a layer's first norm keeps a copy of the layer's input in its place, as Llama's of 16 bits in Hugging Face's classes."""
    software = step.software
    is_narrow = software.element_bytes == 2 and not software.autocast
    return software.reference_code and is_narrow and model.reference_code.norm_bytes >= _NORM_BYTES_WITH_COPY


def layer_tokens(model: Architecture, step: TrainingStep, layer: int) -> float:
    """Of one microbatch on one rank, in the stack that the layer belongs to."""
    return step.decoded_tokens if model.has_cross_attention(layer) else step.microbatch_tokens


def chunk_saved_bytes(model: Architecture, step: TrainingStep, layers: tuple[int, ...]) -> float:
    """What these layers keep of one microbatch on one rank, and once for all of their cross attention the encoder's result,
    with the gradient that each of them adds to. With the last of the encoder's layers goes its last norm.
    """
    kinds = model.kinds_among(layers).values()
    saved = sum(count * layer_saved_bytes(model, step, layer) for count, layer in kinds)
    if not model.encoder_layers or not layers:
        return saved
    source = step.microbatch_tokens * model.hidden / step.layout.stream_ranks
    if model.has_cross_attention(layers[-1]):
        saved += 4.0 * source * _wide(step)
    if model.final_norm and model.encoder_layers - 1 in layers:
        saved += _encoder_norm_bytes(model, step) * source * _wide(step)
    return saved


def _encoder_norm_bytes(model: Architecture, step: TrainingStep) -> float:
    """Of an element of the encoder's last norm, its result left out, and the mask of a dropout at the end of its stack."""
    autocast = step.software.autocast
    if not step.software.reference_code:
        return 4.0 if autocast else 2.0
    kept = residual_bytes(model, 1, 1, wide=_wide(step))
    if _wide(step) > 1:
        return kept - 2.0
    return kept + fp32_norm_bytes(model) - model.reference_code.norm_bytes if autocast else kept - 2.0


def _attention_bytes(model: Architecture, step: TrainingStep, tokens: float, seen: float) -> float:
    """Queries, keys, values and the result that goes into the output projection; scores where they reach memory. `seen`: of
    how many tokens of the microbatch there are keys and values on the rank.
    """
    software = step.software
    if model.latent is not None:
        latent = model.latent
        query = key = model.n_heads * (latent.nope_head_dim + latent.rope_head_dim)
        value = result = model.n_heads * latent.value_head_dim
        low = 2.0 * ((latent.q_rank or 0) + latent.kv_rank)
    else:
        query = result = model.n_heads * model.head_dim
        key = value = model.n_kv_heads * model.head_dim
        low = 0.0
    if model.qk_norm and not software.reference_code:
        low += 2.0 * (query + key)  # as the products gave them to the norms, whose results are rotated
    # Made contiguous, or rotated, by kernels of their own.
    are_views = software.takes_views and software.fused_attention and model.positions > 0
    copied_query = copied_keys = 0.0 if software.fused_rotary or software.liger or are_views else 1.0
    if software.repeats_keys and not software.reference_code:
        copied_query = copied_keys = 0.0
        key, value = query, result
    if software.reference_code:
        low += head_norm_bytes(model, wide=_wide(step)) * (query + key)
        copied_query = 0.0
        copied_keys = float(model.reference_code.fused_qkv and software.fused_attention)
        if not software.fused_attention:  # keys and values are repeated for every query head
            key, value = query, result
    kept = 2.0 * seen * (key + value) * (1.0 + copied_keys)
    kept += tokens * (2.0 * query * (1.0 + copied_query) + low)
    if model.latent is not None and software.repeats_latent and step.layout.recompute == "pointwise":
        kept = tokens * low
    kept += tokens * result * _attention_result_bytes(step)
    if model.attention_gate:  # its sigmoid, and what of attention's result it leaves
        kept += tokens * result * (2.0 + step.software.saved_input_bytes)
    if software.fused_attention:
        return kept + tokens * 4.0 * model.n_heads / _wide(step)
    if step.layout.recompute == "selective":
        return kept
    # Softmax's result, and with dropout its mask and its result.
    per_score = 5.0 if software.dropout else 2.0
    if software.autocast:
        per_score = 7.0 if software.dropout else 6.0  # softmax in fp32, and a copy for the product
    if software.reference_code:
        per_score = score_bytes(model, is_fp32=model.reference_code.fp32_softmax or software.autocast)
    if _wide(step) > 1:  # all of them in fp32, but the mask
        drops = model.reference_code.score_dropout if software.reference_code else software.dropout
        per_score = (9.0 if drops else 4.0) / _wide(step)
    length = seen * step.layout.context / step.layout.micro_batch_size
    return kept + per_score * tokens * model.n_heads * length


def _attention_result_bytes(step: TrainingStep) -> float:
    """Of an element: fused attention keeps it in two bytes, and the output projection, whose input it is, in its own."""
    software = step.software
    if not software.keeps_narrow:
        return 2.0
    if software.narrow_activations:
        return 1.5
    return software.saved_input_bytes + (2.0 if software.fused_attention else 0.0)


def _ffn_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """Inputs of the activation, and of the second product; unfused gates keep the activation's result too. Pointwise
    recomputation leaves the activation's inputs alone.
    """
    software = step.software
    narrow = software.keeps_narrow and software.narrow_activations
    inputs = (4.0 if model.gated_mlp else 2.0) / (2.0 if narrow else 1.0)
    per_column = inputs + software.saved_input_bytes
    if model.gated_mlp and not software.fused_mlp:
        per_column += 2.0
    if narrow or step.layout.recompute == "pointwise":
        per_column = inputs
    if step.software.reference_code:
        per_column = ffn_column_bytes(model, wide=_wide(step))
        if step.software.autocast:
            per_column += fp32_column_bytes(model)
    if model.experts is None or not model.has_experts(layer):
        return tokens * model.ffn * per_column if model.has_feed_forward(layer) else 0.0
    experts = model.experts
    passed = tokens * experts.experts_per_token * step.layout.expert_imbalance
    results = 4.0 if software.weighs_experts_wide else 2.0
    tokens_bytes = software.saved_input_bytes + (0.0 if software.weighs_inside else results)
    routed = passed * (experts.expert_ffn * per_column + tokens_bytes * model.hidden)
    return (
        routed + tokens * experts.shared_ffn * per_column + 4.0 * tokens * experts.num_experts / _wide(step)
    )


def layer_weight_input_bytes(model: Architecture, step: TrainingStep, layer: int) -> float:
    """What a backward that is split keeps for the weights' gradients: the inputs of the products with weights, and the
    gradients of their results, which there were none of before (of a GPT 14 s b h and 18 s b h bytes: arXiv:2401.10241,
    section 3, 32 s b h).

    With full recomputation inputs are there again when it begins, until the weights' gradients are through.
    """
    layout = step.layout
    tokens = layer_tokens(model, step, layer)
    if step.software.lora is not None:
        return input_bytes(model, step, layer, tokens)
    spread = layout.stream_ranks
    result = model.n_heads * (model.latent.value_head_dim if model.latent is not None else model.head_dim)
    result *= model.has_attention(layer)
    if model.recurrence is not None and model.has_recurrence(layer):
        result += model.recurrence.inner
    inner = float(model.ffn) if model.has_feed_forward(layer) else 0.0
    if model.experts is not None and model.has_experts(layer):
        passed = model.experts.experts_per_token * layout.expert_imbalance
        inner = passed * (model.experts.expert_ffn + model.hidden) + model.experts.shared_ffn
    if model.has_cross_attention(layer):
        result, inner = 2 * result, inner + model.hidden * layout.tensor / spread
    norms = min(model.num_sublayers(layer), 2)
    inputs = tokens * (2.0 * norms * model.hidden / spread + 2.0 * (result + inner) / layout.tensor)
    each = step.software.saved_input_bytes / 2 * _wide(step)
    return (inputs + _result_gradient_bytes(model, step, layer, tokens)) * each


def _result_gradient_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """Gradients of the results of a layer's products with weights, in two bytes, on one rank."""
    layout = step.layout
    found = 0.0
    for one in layer_matrices(model, layer):
        rows = tokens if one.reads != "encoder" else step.microbatch_tokens
        if one.num_experts and model.experts is not None:
            rows *= model.experts.experts_per_token * layout.expert_imbalance
        found += 2.0 * rows * one.columns / (layout.stream_ranks if one.is_partial else layout.tensor)
    return found


def layer_backward_bytes(model: Architecture, step: TrainingStep, layers: tuple[int, ...]) -> float:
    """What a layer's backward holds beyond what was saved, at its widest product: the gradients of its result, of its
    weights before they are accumulated and of its input, and the input gathered from the tensor-parallel ranks. Frozen weights have no gradients, and quantised ones a copy in 16 bits,
    one at a time.
    """
    layout = step.layout
    if not layers:
        return 0.0
    kinds = [layer for _, layer in model.kinds_among(layers).values()]
    tokens = max(layer_tokens(model, step, layer) for layer in kinds)
    columns = max(_widest_columns(model, layer) for layer in kinds) / layout.tensor
    gathered = 2.0 if layout.sequence_parallel else 1.0
    if layout.tensor_kind != "1d":
        gathered = 2.0 / layout.grid_side
    weights = model.hidden * columns
    lora = step.software.lora
    if lora is not None:
        widest = max(_widest_columns(model, layer, is_one=True) for layer in kinds)
        weights = model.hidden * widest / layout.tensor if lora.is_quantized else 0.0
    held = step.software.element_bytes * (tokens * columns + weights + gathered * tokens * model.hidden)
    if step.software.autocast:  # gradients of the 16-bit copies, and what they become in fp32
        held = 2.0 * tokens * columns + 6.0 * (weights + gathered * model.hidden * tokens)
    return max(held, *(_experts_backward_bytes(model, step, layer, tokens) for layer in kinds))


# Of an element of experts' results that are weighed in fp32: their gradient, its product with the weights, and that with the
# results, which becomes the weights' gradient.
_WEIGHED_WIDE = 12.0


def _experts_backward_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """The same of a layer's routed experts: gradients of the gate's two products, of their weights and of the tokens that came in, or
    of results that are weighed, whichever is more."""
    if model.experts is None or not model.has_experts(layer):
        return 0.0
    layout, software, experts = step.layout, step.software, model.experts
    passed = tokens * experts.experts_per_token * layout.expert_imbalance / layout.tensor
    inner = (2.0 if model.gated_mlp else 1.0) * experts.expert_ffn
    weights = 0.0
    if software.lora is None and not software.fused_accumulation:
        weights = experts.num_experts * inner * model.hidden / step.expert_ranks / step.expert_tensor_ranks
    held = software.element_bytes * (passed * (inner + model.hidden) + weights)
    if software.weighs_experts_wide:
        held = max(held, _WEIGHED_WIDE * passed * model.hidden)
    return held


def _widest_columns(model: Architecture, layer: int, *, is_one: bool = False) -> float:
    """Of the widest product of a layer: of its feed-forward block (gate and up together, unless `is_one`), or what comes
    into its recurrence."""
    columns = 0.0
    if model.has_feed_forward(layer):
        columns = (2.0 if model.gated_mlp and not is_one else 1.0) * model.ffn
    if model.recurrence is not None and model.has_recurrence(layer):
        columns = max(columns, float(model.recurrence.in_columns))
    return columns


def head_saved_bytes(model: Architecture, step: TrainingStep) -> float:
    """The last norm's input and result, and the logits with what their cross entropy holds at its peak."""
    layout = step.layout
    tokens = step.decoded_tokens
    parts = 1 if layout.tensor_kind == "1d" else layout.tensor
    norm_bytes, logit_bytes = 4.0, LOGIT_BYTES
    if step.software.autocast:
        norm_bytes = 2.0 + (fp32_norm_bytes(model) if step.software.reference_code else 4.0)
    elif step.software.reference_code:
        norm_bytes, logit_bytes = model.reference_code.norm_bytes, model.reference_code.logit_bytes
    elif step.software.logit_bytes is not None:
        logit_bytes = step.software.logit_bytes
    if _wide(step) > 1:  # nothing is cast
        norm_bytes, logit_bytes = 8.0, _wide(step) * _NARROW_LOGIT_BYTES
        if step.software.reference_code:
            norm_bytes = 4.0 + fp32_norm_bytes(model)
    if step.software.loss_in_place:
        logit_bytes = _IN_PLACE_LOGIT_BYTES
    if step.software.loss_bytes == 2:
        logit_bytes = _NARROW_LOGIT_BYTES
    logit_bytes += step.software.held_logit_bytes
    # Megatron's own fusion joins kernels, and has the softmax in fp32 as before (megatron/core/fusions/fused_cross_entropy.py).
    if step.software.fused_loss and not step.software.loss_in_place:
        logit_bytes = _fused_logit_bytes(step.software) * _wide(step)
    if step.software.linear_loss:
        # As many pieces as make one of the logits about as large as the stream (Hsu et al. 2024, arXiv:2410.10989,
        # section 3.2).
        logit_bytes /= max(1.0, model.vocab / model.hidden)
    ranks = layout.tensor if step.software.loss_parallel else 1
    return tokens * (norm_bytes * model.hidden / parts + logit_bytes * model.vocab / ranks)


def _fused_logit_bytes(software: Software) -> float:
    """At the peak of a loss in one kernel."""
    if software.wide_fused_loss:
        return _WIDE_FUSED_LOGIT_BYTES
    if software.compiled_loss:
        return _COMPILED_LOGIT_BYTES + (_RETURNED_LOGIT_BYTES if software.returns_logits else 0.0)
    return _FUSED_LOGIT_BYTES


def whole_logits_bytes(model: Architecture, step: TrainingStep) -> float:
    """The largest single tensor of a loss: the logits as it takes them."""
    if step.software.linear_loss:
        return 0.0
    size = 2.0 if step.software.fused_loss else step.software.loss_bytes
    return (
        size * step.decoded_tokens * model.vocab / (step.layout.tensor if step.software.loss_parallel else 1)
    )
