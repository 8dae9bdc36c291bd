"""Decoders with linear attention other than delta nets of one gate a head, out of a Hugging Face config.json: Kimi's delta
attention, and MiniMax's lightning attention. What a key's absence means is what the model's own class takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from memadvisor.architecture import Architecture, Experts
from memadvisor.architectures.config_experts import deepseek_experts
from memadvisor.architectures.config_hybrids import layer_pattern
from memadvisor.architectures.config_latent import latent_dense
from memadvisor.architectures.config_shapes import base
from memadvisor.architectures.config_values import Config, layer_numbers, whole
from memadvisor.recurrence import Recurrence

_KIMI = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _kimi_linear(config: Config, name: str) -> Architecture:
    """The checkpoint's own words are in a table inside (linear_attn_config), whose layers are counted from one."""
    inner = config.get("linear_attn_config")
    linear: Config = inner if isinstance(inner, Mapping) else {}
    found = latent_dense({**_KIMI, **config}, name)
    words = {
        "num_experts_per_tok": config.get("num_experts_per_token", 8),
        "n_group": config.get("num_expert_group"),
        "n_routed_experts": config.get("num_experts", 256),
    }
    given = {key: value for key, value in words.items() if value is not None}
    attending = layer_numbers(linear, "full_attn_layers")
    if attending is None:
        attending = [at + 1 for at in range(found.n_layers) if at and at % 4 == 0]
    kinds = ["full_attention" if at + 1 in attending else "linear_attention" for at in range(found.n_layers)]
    head_dim = whole(linear, "head_dim", default=whole(config, "linear_head_dim", default=128))
    n_heads = whole(linear, "num_heads", default=whole(config, "linear_num_heads", default=32))
    usual = whole(config, "linear_conv_kernel_dim", default=4)
    return dataclasses.replace(
        found,
        experts=deepseek_experts({**_KIMI, **config, **given}, shared=1),
        layer_pattern=layer_pattern(config, kinds, found.n_layers),
        recurrence=Recurrence(
            kind="kimi_delta",
            n_heads=n_heads,
            head_dim=head_dim,
            n_key_heads=n_heads,
            state_dim=head_dim,
            convolution=whole(linear, "short_conv_kernel_size", default=usual),
            norm=head_dim,
            step_rank=head_dim,
        ),
    )


def _minimax(config: Config, name: str) -> Architecture:
    """Each second layer attends, or as a list says, in MiniMax-01's own files of ones and zeros."""
    found = base(config, name, gated=True, tied=False)
    listed = layer_numbers(config, "attn_type_list")
    if listed is None:
        kinds = ["linear_attention" if at % 2 else "full_attention" for at in range(found.n_layers)]
    else:
        kinds = ["full_attention" if attends else "linear_attention" for attends in listed]
    return dataclasses.replace(
        found,
        experts=Experts(
            num_experts=whole(config, "num_local_experts", default=8),
            experts_per_token=whole(config, "num_experts_per_tok", default=2),
            expert_ffn=found.ffn,
        ),
        layer_pattern=layer_pattern(config, kinds, found.n_layers),
        recurrence=Recurrence(
            kind="lightning",
            n_heads=found.n_heads,
            head_dim=found.head_dim,
            n_key_heads=found.n_heads,
            state_dim=found.head_dim,
            convolution=0,
            norm=found.n_heads * found.head_dim,
        ),
    )


LINEAR_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "kimi_linear": _kimi_linear,
    "minimax": _minimax,
}
