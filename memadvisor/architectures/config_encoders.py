"""Encoders of the BERT family out of a Hugging Face config.json, each with the head of a masked language model.

Left out are tables of kinds of tokens, the pooler, and the layer and the bias that the head has before and behind its
matrix: together less than a hundredth of a model of usual size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_shapes import base, llama, plain
from memadvisor.architectures.config_values import Config, whole
from memadvisor.errors import UsageError


def _bert(config: Config, name: str) -> Architecture:
    found = plain(config, name, positions=whole(config, "max_position_embeddings", default=512))
    return dataclasses.replace(found, causal=False, embedding_norm=True, final_norm=False)


def _distilbert(config: Config, name: str) -> Architecture:
    return _bert({**config, "intermediate_size": config.get("hidden_dim")}, name)


def _mpnet(config: Config, name: str) -> Architecture:
    buckets = whole(config, "relative_attention_num_buckets", default=32)
    return dataclasses.replace(_bert(config, name), relative_buckets=buckets)


def _eurobert(config: Config, name: str) -> Architecture:
    return dataclasses.replace(llama(config, name), causal=False)


def _modernbert(config: Config, name: str) -> Architecture:
    """Norms without biases; the first layer lacks one, for the embedding has its own: counted as if the last one were lacking.
    Its windows begin behind a layer that sees all, and are taken to see all."""
    if config.get("norm_bias") or config.get("attention_bias") or config.get("mlp_bias"):
        raise UsageError("biases of a modernbert (norm_bias, attention_bias, mlp_bias) are not known.")
    return dataclasses.replace(
        base(config, name, gated=True, tied=True),
        causal=False,
        embedding_norm=True,
        final_norm=False,
        head_bias=bool(config.get("decoder_bias", True)),
    )


ENCODER_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "bert": _bert,
    "camembert": _bert,
    "distilbert": _distilbert,
    "eurobert": _eurobert,
    "modernbert": _modernbert,
    "mpnet": _mpnet,
    "roberta": _bert,
    "xlm-roberta": _bert,
}
