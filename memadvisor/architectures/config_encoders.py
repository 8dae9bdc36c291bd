"""Encoders of the BERT family out of a Hugging Face config.json, each with the head of a masked language model. The pooler is
left out, as that model leaves it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_shapes import base, llama, plain
from memadvisor.architectures.config_values import Config, whole
from memadvisor.errors import UsageError


def _bert(config: Config, name: str) -> Architecture:
    """Norms behind attention and feed-forward, and over the embedding; a table of kinds of tokens."""
    return _kinds_of_tokens(config, _without_kinds(config, name))


def _without_kinds(config: Config, name: str) -> Architecture:
    found = plain(config, name, positions=whole(config, "max_position_embeddings", default=512))
    return dataclasses.replace(
        found, causal=False, embedding_norm=True, final_norm=False, head_layer=True, head_bias=True
    )


def _kinds_of_tokens(config: Config, found: Architecture) -> Architecture:
    kinds = whole(config, "type_vocab_size", default=2, least=0)
    return dataclasses.replace(found, around=kinds * found.hidden)


def _ernie(config: Config, name: str) -> Architecture:
    """A table of tasks beside that of kinds, where it is used."""
    found = _bert(config, name)
    tasks = whole(config, "task_type_vocab_size", default=3) if config.get("use_task_id") else 0
    return dataclasses.replace(found, around=found.around + tasks * found.hidden)


def _layoutlm(config: Config, name: str) -> Architecture:
    """Tables of a word's place on the page: left and right, top and bottom, width, height. Its class has a pooler in any case."""
    found = _bert(config, name)
    places = 4 * whole(config, "max_2d_position_embeddings", default=1024)
    return dataclasses.replace(found, around=found.around + (places + found.hidden + 1) * found.hidden)


def _esm(config: Config, name: str) -> Architecture:
    """Of proteins: norms before attention and feed-forward, and what tells contacts from the weights of every head."""
    if config.get("is_folding_model"):
        raise UsageError("an ESM that folds (is_folding_model) is not known.")
    found = _without_kinds({"max_position_embeddings": 1026, **config}, name)
    is_rotary = config.get("position_embedding_type", "absolute") == "rotary"
    return dataclasses.replace(
        found,
        positions=0 if is_rotary else found.positions,
        embedding_norm=bool(config.get("emb_layer_norm_before")),
        final_norm=True,
        around=found.n_layers * found.n_heads + 1,
    )


def _electra(config: Config, name: str) -> Architecture:
    """The generator, or the discriminator with its head."""
    hidden = whole(config, "hidden_size", default=256)
    if whole(config, "embedding_size", default=128) != hidden:
        raise UsageError(
            "an ELECTRA whose embedding is not as wide as its layers (embedding_size) is not known."
        )
    return _bert({"type_vocab_size": 2, **config}, name)


def _norms_before(config: Config, name: str) -> Architecture:
    """Norms before attention and feed-forward, and a last one; none over the embedding."""
    return dataclasses.replace(_bert(config, name), embedding_norm=False, final_norm=True)


def _roberta_prelayernorm(config: Config, name: str) -> Architecture:
    return dataclasses.replace(_bert(config, name), final_norm=True)


def _nomic(config: Config, name: str) -> Architecture:
    """A gated block without biases; the head's layer has one."""
    gated = base(config, name, gated=True, tied=True)
    found = dataclasses.replace(
        gated, norm_vectors=2, causal=False, embedding_norm=True, final_norm=False, head_layer=True, head_bias=True
    )  # fmt: skip
    found = _kinds_of_tokens(config, found)
    return dataclasses.replace(found, around=found.around + found.hidden)


def _distilbert(config: Config, name: str) -> Architecture:
    return _without_kinds({**config, "intermediate_size": config.get("hidden_dim")}, name)


def _mpnet(config: Config, name: str) -> Architecture:
    buckets = whole(config, "relative_attention_num_buckets", default=32)
    return dataclasses.replace(_without_kinds(config, name), relative_buckets=buckets)


def _eurobert(config: Config, name: str) -> Architecture:
    return dataclasses.replace(llama(config, name), causal=False)


def _modernbert(config: Config, name: str) -> Architecture:
    """Norms without biases; the first layer lacks one, for the embedding has its own: counted as if the last one were lacking.
    Its windows begin behind a layer that sees all, and are taken to see all."""
    biases = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")
    if any(config.get(key) for key in biases):
        raise UsageError(f"biases of a modernbert ({', '.join(biases)}) are not known.")
    return dataclasses.replace(
        base(config, name, gated=True, tied=True),
        causal=config.get("model_type") == "modernbert-decoder",
        embedding_norm=True,
        final_norm=False,
        head_layer=True,
        head_bias=bool(config.get("decoder_bias", True)),
    )


ENCODER_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "bert": _bert,
    "camembert": _bert,
    "data2vec-text": _bert,
    "distilbert": _distilbert,
    "electra": _electra,
    "ernie": _ernie,
    "esm": _esm,
    "eurobert": _eurobert,
    "layoutlm": _layoutlm,
    "megatron-bert": _norms_before,
    "modernbert": _modernbert,
    "modernbert-decoder": _modernbert,
    "mpnet": _mpnet,
    "nomic_bert": _nomic,
    "roberta": _bert,
    "roberta-prelayernorm": _roberta_prelayernorm,
    "xlm-roberta": _bert,
    "xlm-roberta-xl": _norms_before,
}
