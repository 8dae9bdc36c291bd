"""FLOPs of one step: what the model needs (MFU), and what runs (HFU). A product of m x k and k x n is 2 m n k.

Causal attention is counted in full, as its publishers mostly do (Narayanan et al. 2021, arXiv:2104.04473, equation 3).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.adapters import active_adapter_parameters
from memadvisor.cost.layouts.key_index import index_flops
from memadvisor.cost.layouts.operators import repeated_flops
from memadvisor.cost.layouts.recurrences import recurrence_flops
from memadvisor.cost.layouts.vision_work import tower_flops
from memadvisor.layout import Layout, TrainingStep


def forward_flops(model: Architecture, step: TrainingStep) -> float:
    """Products of one forward over the global batch, the head's among them."""
    if model.encoder_layers:
        products = _encoder_decoder_products(model, step) + _attention_flops(model, step)
        return products + _adapter_flops(model, step)
    products = step.tokens * 2.0 * _parameters_of_products(model) + _attention_flops(model, step)
    return products + step.tokens * _recurrence_flops(model) + _adapter_flops(model, step)


@lru_cache(maxsize=256)
def _parameters_of_products(model: Architecture) -> int:
    embedding = model.embedding_parameters() - model.head_layer_parameters()
    if model.tied_embeddings:  # the table of tokens is the head's matrix
        embedding = model.positions * model.hidden + model.tower_parameters() + model.around
    return model.active_parameters() - embedding


def _encoder_decoder_products(model: Architecture, step: TrainingStep) -> float:
    """The encoder's layers see the source's tokens, as do the keys and values of cross attention; all else the target's."""
    sequences, target_len = step.global_batch_sequences, step.length_of(is_decoder=True)
    num_decoder = model.n_layers - model.encoder_layers
    keys = 2 * model.hidden * model.n_kv_heads * model.head_dim * num_decoder
    encoder = model.encoder_layers * model.layer_parameters(0) + keys
    decoder = num_decoder * model.layer_parameters(model.n_layers - 1) - keys + model.head_parameters()
    return 2.0 * sequences * (step.seq_len * encoder + target_len * decoder)


def _attention_flops(model: Architecture, step: TrainingStep) -> float:
    if model.latent is not None:
        latent = model.latent
        columns = model.n_heads * (latent.nope_head_dim + latent.rope_head_dim + latent.value_head_dim)
    else:
        columns = 2 * model.n_heads * model.head_dim
    if model.encoder_layers:
        source, target = step.seq_len, step.length_of(is_decoder=True)
        num_decoder = model.n_layers - model.encoder_layers
        pairs = model.encoder_layers * source * source + num_decoder * target * (target + source)
        return 2.0 * step.global_batch_sequences * columns * pairs
    seen = step.software.seen_len(step.seq_len)
    keys = sum(
        count * min(seen, model.window_of(layer) or seen)
        for count, layer in model.kinds().values()
        if model.has_attention(layer)
    )
    return 2.0 * step.tokens * columns * keys


def halved_model_flops(model: Architecture, step: TrainingStep) -> float:
    """`model_flops` with half of what causal attention is counted with: a token sees those before it alone. The same of encoders."""
    if not model.causal:
        return model_flops(model, step)
    causal = _attention_flops(model, step)
    if model.encoder_layers:  # the decoder's own alone
        source, target = step.seq_len, step.length_of(is_decoder=True)
        num_decoder = model.n_layers - model.encoder_layers
        pairs = model.encoder_layers * source * source + num_decoder * target * (target + source)
        causal *= num_decoder * target * target / pairs
    return model_flops(model, step) - 1.5 * causal


def _recurrence_flops(model: Architecture) -> float:
    """Of one token's forward, beside the products."""
    if model.recurrence is None:
        return 0.0
    layers = sum(count for count, layer in model.kinds().values() if model.has_recurrence(layer))
    return layers * recurrence_flops(model.recurrence)


def model_flops(model: Architecture, step: TrainingStep) -> float:
    """The forward and twice as much backward; once as much of frozen matrices, which have no gradients."""
    lora, tower = step.software.lora, model.tower
    images = index_flops(model, step) + tower_flops(model, step) * (
        3.0 if tower is not None and tower.is_trained else 1.0
    )
    if lora is None:
        return 3.0 * forward_flops(model, step) + images
    mixing = _attention_flops(model, step) + step.tokens * _recurrence_flops(model)
    frozen = forward_flops(model, step) - mixing - _adapter_flops(model, step)
    head = 2.0 * step.tokens * model.head_parameters() if lora.trains_ends else 0.0
    return 3.0 * forward_flops(model, step) - frozen + head + images


def _adapter_flops(model: Architecture, step: TrainingStep) -> float:
    """Products of low-rank adapters of one forward."""
    lora = step.software.lora
    return 0.0 if lora is None else 2.0 * step.tokens * active_adapter_parameters(model, lora)


def executed_flops(model: Architecture, step: TrainingStep) -> float:
    """With the forwards that run again; the head does not."""
    plain = model_flops(model, step)
    if step.layout.recompute == "full":
        decoded = step.global_batch_sequences * step.length_of(is_decoder=True)
        again = forward_flops(model, step) - decoded * 2.0 * model.head_parameters()
        if model.tower is not None and model.tower.is_trained:
            again += tower_flops(model, step)
        return plain + step.layout.recompute_share * again
    if step.repeats_operators:
        return plain + _repeated_flops(model, step) + step.tokens * _recurrence_flops(model)
    if step.layout.recompute == "selective":
        return plain + _attention_flops(model, step)
    return plain


def _repeated_flops(model: Architecture, step: TrainingStep) -> float:
    """Of all layers over the global batch, as one rank without parallelism would do them."""
    sequences = step.global_batch_sequences
    whole = replace(step, layout=Layout(micro_batch_size=sequences, recompute="selective"))
    flops = 0.0
    for kind, (count, layer) in model.kinds().items():
        tokens = sequences * step.length_of(is_decoder=kind.has_cross_attention)
        flops += count * repeated_flops(model, whole, layer, tokens)
    return flops if step.software.fused_attention else flops + _attention_flops(model, step)
