"""The two usual shapes of a decoder, out of a Hugging Face config.json: a Llama's, and a GPT-2's."""

from __future__ import annotations

import dataclasses

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_values import Config, whole
from memadvisor.errors import UsageError

MOST_LAYERS = 10_000
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "n_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "n_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "vocab": ("vocab_size",),
}


def base(config: Config, name: str, *, gated: bool, tied: bool) -> Architecture:
    """Sizes alone; `tied`: whether the model's class ties its embeddings where the config does not say."""
    hidden, n_layers, n_heads, vocab = (whole(config, *keys) for keys in _NAMES.values())
    if n_layers > MOST_LAYERS:  # before anything is listed layer by layer
        raise UsageError(
            f"{name!r} has more than {MOST_LAYERS:,} layers.", hint="look for a digit too many in the file."
        )
    head_dim = whole(config, "head_dim", default=0)
    if not head_dim:
        if hidden % n_heads:
            raise UsageError(f"{n_heads} heads do not divide hidden {hidden} of {name!r}.")
        head_dim = hidden // n_heads
    return Architecture(
        name=name,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=whole(config, "num_key_value_heads", default=n_heads),
        head_dim=head_dim,
        ffn=whole(config, "n_inner", "ffn_dim", "intermediate_size", default=4 * hidden),
        vocab=vocab,
        tied_embeddings=bool(config.get("tie_word_embeddings", tied)),
        gated_mlp=gated,
    )


def llama(config: Config, name: str, *, tied: bool = False) -> Architecture:
    """A gated feed-forward block, RMSNorm, biases only where the config says so."""
    attention = bool(config.get("attention_bias", False))
    return dataclasses.replace(
        base(config, name, gated=True, tied=tied),
        qkv_biases=attention,
        output_bias=attention,
        mlp_biases=bool(config.get("mlp_bias", False)),
    )


def plain(config: Config, name: str, *, tied: bool = True, positions: int = 0) -> Architecture:
    """Two matrices, biases, LayerNorm."""
    return dataclasses.replace(
        base(config, name, gated=False, tied=tied), biases=True, norm_vectors=2, positions=positions
    )
