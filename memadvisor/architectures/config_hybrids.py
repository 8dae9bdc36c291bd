"""Models with recurrences in place of attention, or beside it, out of a Hugging Face config.json. What a key's absence
means is what the model's own class takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from memadvisor.architecture import Architecture, Experts
from memadvisor.architectures.config_experts import in_layers, qwen_experts
from memadvisor.architectures.config_shapes import base, llama
from memadvisor.architectures.config_values import Config, layer_numbers, whole
from memadvisor.errors import UsageError
from memadvisor.recurrence import Recurrence

# A layer's letter (recurrence.BLOCKS) by what configs call it, where each has a feed-forward block besides, and where none has.
_WITH_BLOCK = {
    "full_attention": "a", "attention": "a", "sliding_attention": "a",
    "linear_attention": "r", "mamba": "r", "mamba2": "r", "conv": "r", "hybrid": "b",
}  # fmt: skip
_ALONE = {
    "full_attention": "A", "attention": "A", "*": "A", "linear_attention": "R", "mamba": "R", "M": "R",
    "mlp": "F", "-": "F", "moe": "E", "E": "E",
}  # fmt: skip


def _pattern(kinds: Sequence[Any], letters: dict[str, str], n_layers: int) -> str:
    """The shortest that these kinds of layers repeat. Raises UsageError for a kind that is not known."""
    unknown = next((kind for kind in kinds if not isinstance(kind, str) or kind not in letters), None)
    if unknown is not None:
        raise UsageError(
            f"a layer of kind {unknown!r} is not known.", hint=f"known are {', '.join(letters)}."
        )
    if len(kinds) != n_layers:
        raise UsageError(
            f"{len(kinds)} kinds of layers are named, of {n_layers} layers.", hint="name each layer's."
        )
    word = "".join(letters[kind] for kind in kinds)
    repeated = (size for size in range(1, n_layers // 2 + 1) if (word[:size] * n_layers)[:n_layers] == word)
    return word[: next(repeated, n_layers)]


def _listed(config: Config, n_layers: int) -> Sequence[Any] | None:
    found = config.get("layer_types") or config.get("layers_block_type")
    if found is not None and not isinstance(found, list):
        raise UsageError(f"layer_types is {found!r}.", hint=f"it is a list of {n_layers} kinds of layers.")
    return found


def layer_pattern(config: Config, usual: Sequence[str], n_layers: int) -> str:
    """Of layers that have a feed-forward block each, as they are listed, or else as is usual."""
    return _pattern(_listed(config, n_layers) or usual, _WITH_BLOCK, n_layers)


def _delta_net(config: Config, heads: int, key_dim: int, value_dim: int) -> Recurrence:
    """The last three: where the config does not say."""
    value_head = whole(config, "linear_value_head_dim", default=value_dim)
    return Recurrence(
        kind="gated_delta_net",
        n_heads=whole(config, "linear_num_value_heads", default=heads),
        head_dim=value_head,
        n_key_heads=whole(config, "linear_num_key_heads", default=heads),
        state_dim=whole(config, "linear_key_head_dim", default=key_dim),
        convolution=whole(config, "linear_conv_kernel_dim", default=4),
        norm=value_head,
    )


def _every_fourth(config: Config, n_layers: int) -> str:
    """Full attention in each fourth layer, where the config does not say otherwise."""
    every = whole(config, "full_attention_interval", default=4)
    kinds = _listed(config, n_layers) or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(n_layers)
    ]
    return _pattern(kinds, _WITH_BLOCK, n_layers)


def _qwen3_5(config: Config, name: str) -> Architecture:
    """Its gate doubles the queries' product; norms over each head's queries and keys."""
    found = llama({"head_dim": 256, **config}, name)
    recurrence = _delta_net({"linear_num_value_heads": 32, **config}, 16, 128, 128)
    return dataclasses.replace(
        found,
        qk_norm=2 * found.head_dim,
        attention_gate=True,
        layer_pattern=_every_fourth(config, found.n_layers),
        recurrence=recurrence,
    )


def _qwen3_next(config: Config, name: str) -> Architecture:
    found = _qwen3_5({"intermediate_size": 5632, **config}, name)
    shared = whole(config, "shared_expert_intermediate_size", default=512, least=0)
    return dataclasses.replace(found, experts=qwen_experts(config, found.n_layers, shared))


def _olmo_hybrid(config: Config, name: str) -> Architecture:
    """Norms over all queries and all keys of its attention."""
    found = llama(config, name)
    key_dim = int(0.75 * found.hidden / whole(config, "linear_num_key_heads", default=found.n_heads))
    return dataclasses.replace(
        found,
        qk_norm=(found.n_heads + found.n_kv_heads) * found.head_dim,
        layer_pattern=_every_fourth(config, found.n_layers),
        recurrence=_delta_net(
            config, found.n_heads, key_dim, 2 * whole(config, "linear_key_head_dim", default=key_dim)
        ),
    )


def _mamba2_mixer(
    config: Config, inner: int, *, groups: int, state: int, has_norm: bool = True
) -> Recurrence:
    """In the words of Bamba's config; `groups`, `state`: where it does not say."""
    heads = whole(config, "mamba_n_heads", "mamba_num_heads", default=128)
    if inner % heads:
        raise UsageError(f"{heads} heads of Mamba do not divide {inner} columns.")
    return Recurrence(
        kind="mamba2",
        n_heads=heads,
        head_dim=inner // heads,
        n_key_heads=whole(config, "mamba_n_groups", "n_groups", default=groups),
        state_dim=whole(config, "mamba_d_state", "ssm_state_size", default=state),
        convolution=whole(config, "mamba_d_conv", "conv_kernel", default=4),
        convolution_bias=bool(config.get("mamba_conv_bias", config.get("use_conv_bias", True))),
        in_bias=bool(config.get("mamba_proj_bias", False)),
        out_bias=bool(config.get("mamba_proj_bias", False)),
        norm=inner if has_norm else 0,
    )


def _bamba(config: Config, name: str) -> Architecture:
    found = llama(config, name)
    attending = layer_numbers(config, "attn_layer_indices") or []
    kinds = ["attention" if layer in attending else "mamba" for layer in range(found.n_layers)]
    inner = whole(config, "mamba_expand", default=2) * found.hidden
    return dataclasses.replace(
        found,
        layer_pattern=_pattern(_listed(config, found.n_layers) or kinds, _WITH_BLOCK, found.n_layers),
        recurrence=_mamba2_mixer(config, inner, groups=1, state=256),
    )


def _granite_hybrid(config: Config, name: str) -> Architecture:
    """Columns that all tokens pass in each layer, and experts beside them, unless there are none."""
    found = llama(config, name)
    shared_ffn = whole(config, "shared_intermediate_size", default=1024)
    experts = None
    if config.get("num_local_experts", 8):
        experts = Experts(
            num_experts=whole(config, "num_local_experts", default=8),
            experts_per_token=whole(config, "num_experts_per_tok", default=2),
            expert_ffn=found.ffn,
            shared_ffn=shared_ffn,
        )
    kinds = _listed(config, found.n_layers) or ["mamba"] * found.n_layers
    inner = whole(config, "mamba_expand", default=2) * found.hidden
    return dataclasses.replace(
        found,
        ffn=found.ffn if experts else shared_ffn,
        experts=experts,
        layer_pattern=_pattern(kinds, _WITH_BLOCK, found.n_layers),
        recurrence=_mamba2_mixer(config, inner, groups=1, state=256),
    )


def _falcon_h1(config: Config, name: str) -> Architecture:
    """Attention and Mamba side by side in each layer."""
    found = llama(config, name)
    inner = whole(config, "mamba_d_ssm", default=whole(config, "mamba_expand", default=2) * found.hidden)
    recurrence = _mamba2_mixer(
        config, inner, groups=1, state=256, has_norm=bool(config.get("mamba_rms_norm", False))
    )
    recurrence = dataclasses.replace(recurrence, out_bias=bool(config.get("projectors_bias", False)))
    return dataclasses.replace(found, layer_pattern="b", recurrence=recurrence)


def _nemotron_h(config: Config, name: str) -> Architecture:
    """Each layer is one part alone, with one norm."""
    if config.get("moe_latent_size"):
        raise UsageError("experts of a narrower stream (moe_latent_size) are not known.")
    kinds = (
        config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types")
    )
    if not isinstance(kinds, (str, list)) or not kinds:
        raise KeyError("hybrid_override_pattern")
    found = llama({"head_dim": 128, **config, "num_hidden_layers": len(kinds)}, name)
    experts = None
    if set(kinds) & {"E", "moe"}:
        if found.mlp_biases:
            raise UsageError("experts without biases beside blocks with them (mlp_bias) are not known.")
        experts = Experts(
            num_experts=whole(config, "n_routed_experts", "num_local_experts"),
            experts_per_token=whole(config, "num_experts_per_tok"),
            expert_ffn=whole(config, "moe_intermediate_size"),
            shared_ffn=whole(config, "moe_shared_expert_intermediate_size"),
            groups=whole(config, "n_group", default=1),
            groups_per_token=whole(config, "topk_group", default=1),
        )
    inner = whole(config, "mamba_num_heads", default=128) * whole(config, "mamba_head_dim", default=64)
    recurrence = _mamba2_mixer(config, inner, groups=8, state=128)
    biased = bool(config.get("use_bias", False))
    return dataclasses.replace(
        found,
        tied_embeddings=False,
        gated_mlp=False,
        qkv_biases=False,
        output_bias=False,
        experts=experts,
        layer_pattern=_pattern(kinds, _ALONE, found.n_layers),
        recurrence=dataclasses.replace(recurrence, in_bias=biased, out_bias=biased),
    )


def _mamba_mixer(config: Config, hidden: int, prefix: str, *, has_norms: bool = False) -> Recurrence:
    """`prefix`: of its keys, where it is a part of another model."""
    inner = whole(config, f"{prefix}expand", default=2) * hidden
    if not prefix:  # a model of nothing else
        inner = whole(config, "intermediate_size", default=inner)
    state = whole(config, "state_size", "mamba_d_state", default=16)
    given = config.get("time_step_rank", config.get("mamba_dt_rank", "auto"))
    rank = -(-hidden // 16) if given in ("auto", None) else whole({"rank": given}, "rank")
    biased = bool(config.get("use_bias", config.get("mamba_proj_bias", False)))
    return Recurrence(
        kind="mamba",
        n_heads=inner,
        head_dim=1,
        state_dim=state,
        convolution=whole(config, "conv_kernel", "mamba_d_conv", default=4),
        convolution_bias=bool(config.get("use_conv_bias", config.get("mamba_conv_bias", True))),
        in_bias=biased,
        out_bias=biased,
        norm=rank + 2 * state if has_norms else 0,
        step_rank=rank,
    )


def _jamba(config: Config, name: str) -> Architecture:
    found = llama(config, name)
    every = whole(config, "attn_layer_period", default=8, least=0)
    first = whole(config, "attn_layer_offset", default=4, least=0)
    period = whole(config, "expert_layer_period", default=2, least=0)
    offset = whole(config, "expert_layer_offset", default=1, least=0)
    if not every or not period:
        raise UsageError("attn_layer_period or expert_layer_period is 0.", hint="both are 1 or more.")
    kinds = ["attention" if layer % every == first else "mamba" for layer in range(found.n_layers)]
    experts = None
    if whole(config, "num_experts", default=16) > 1:
        all_layers = Experts(
            num_experts=whole(config, "num_experts", default=16),
            experts_per_token=whole(config, "num_experts_per_tok", default=2),
            expert_ffn=found.ffn,
        )
        layers = [layer for layer in range(found.n_layers) if layer % period == offset]
        experts = in_layers(all_layers, layers, found.n_layers, "expert_layer_period, expert_layer_offset")
    return dataclasses.replace(
        found,
        experts=experts,
        layer_pattern=_pattern(kinds, _WITH_BLOCK, found.n_layers),
        recurrence=_mamba_mixer(config, found.hidden, "mamba_", has_norms=True),
    )


def _recurrent_alone(config: Config, name: str, *, tied: bool) -> Architecture:
    """No attention and no feed-forward block: a norm and a recurrence in each layer."""
    return dataclasses.replace(
        base({**config, "num_attention_heads": 1, "head_dim": 1}, name, gated=True, tied=tied),
        layer_pattern="R",
    )


def _mamba(config: Config, name: str) -> Architecture:
    found = _recurrent_alone(config, name, tied=True)
    return dataclasses.replace(found, recurrence=_mamba_mixer(config, found.hidden, ""))


def _mamba2(config: Config, name: str) -> Architecture:
    found = _recurrent_alone(config, name, tied=False)
    biased = bool(config.get("use_bias", False))
    words = {
        "mamba_n_heads": config.get("num_heads"),
        "mamba_d_state": config.get("state_size"),
        "mamba_proj_bias": biased,
    }
    inner = whole(config, "expand", default=2) * found.hidden
    recurrence = _mamba2_mixer({**config, **words}, inner, groups=8, state=128)
    return dataclasses.replace(found, recurrence=recurrence)


def _lfm2(config: Config, name: str) -> Architecture:
    """Short convolutions beside attention; a block's width is a share of what the config says."""
    ffn = whole(config, "block_ff_dim", "intermediate_size", default=12288)
    if config.get("block_auto_adjust_ff_dim", True):
        multiple = whole(config, "block_multiple_of", default=256)
        multiplier = config.get("block_ffn_dim_multiplier", 1.0)
        ffn = int(2 * ffn / 3)
        ffn = -(-(ffn if multiplier is None else int(float(multiplier) * ffn)) // multiple) * multiple
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    heads = whole(config, "num_key_value_heads", default=8)
    found = llama(
        {**config, "intermediate_size": ffn, "tie_word_embeddings": tied, "num_key_value_heads": heads}, name
    )
    attending = layer_numbers(config, "full_attn_idxs")
    kinds = [
        "full_attention" if attending is None or layer in attending else "conv"
        for layer in range(found.n_layers)
    ]
    pattern = _pattern(_listed(config, found.n_layers) or kinds, _WITH_BLOCK, found.n_layers)
    biased = bool(config.get("conv_bias", False))
    recurrence = Recurrence(
        kind="short_convolution",
        n_heads=found.hidden,
        head_dim=1,
        state_dim=1,
        convolution=whole(config, "conv_L_cache", default=3),
        convolution_bias=biased,
        in_bias=biased,
        out_bias=biased,
    )
    return dataclasses.replace(
        found, qk_norm=2 * found.head_dim, layer_pattern=pattern, recurrence=recurrence
    )


def _lfm2_moe(config: Config, name: str) -> Architecture:
    """Experts behind the dense layers, whose blocks are as wide as the config says."""
    found = _lfm2({**config, "block_auto_adjust_ff_dim": False}, name)
    dense = whole(config, "num_dense_layers", default=2, least=0)
    experts = Experts(
        num_experts=whole(config, "num_experts", default=32),
        experts_per_token=whole(config, "num_experts_per_tok", default=4),
        expert_ffn=whole(config, "moe_intermediate_size", default=1792),
        first_dense=dense,
    )
    return dataclasses.replace(found, experts=experts if dense < found.n_layers else None)


HYBRID_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_moe_text": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}
