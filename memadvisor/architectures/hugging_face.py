"""Hugging Face's config.json -> Architecture."""

from __future__ import annotations

import dataclasses

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_defaults import with_defaults
from memadvisor.architectures.config_dense import DENSE_READERS
from memadvisor.architectures.config_encoders import ENCODER_READERS
from memadvisor.architectures.config_experts import EXPERT_READERS
from memadvisor.architectures.config_hybrids import HYBRID_READERS
from memadvisor.architectures.config_images import text_of, with_images
from memadvisor.architectures.config_latent import LATENT_READERS
from memadvisor.architectures.config_linear import LINEAR_READERS
from memadvisor.architectures.config_patches import PATCH_READERS
from memadvisor.architectures.config_values import Config
from memadvisor.architectures.config_windows import with_windows
from memadvisor.architectures.encoder_decoders import ENCODER_DECODER_READERS
from memadvisor.architectures.not_described import why_not
from memadvisor.architectures.reference_code import code_of
from memadvisor.errors import UsageError

_READERS = {
    **DENSE_READERS,
    **EXPERT_READERS,
    **LATENT_READERS,
    **LINEAR_READERS,
    **HYBRID_READERS,
    **ENCODER_READERS,
    **ENCODER_DECODER_READERS,
    **PATCH_READERS,
}
# The language models inside models of text and images, and classes that come with a checkpoint: read as those they are alike.
_ALIKE = {
    "apertus1p5_text": "apertus",
    "bailing_moe": "glm4_moe",
    "bailing_moe_v2": "glm4_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "granite_docling_text": "granite",
    "hunyuan": "hunyuan_v1_moe",
    "internlm2": "llama",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "minimax_m1": "minimax",
    "minimax_text_01": "minimax",
    "paddleocr_vl_text": "ernie4_5",
    "phi4_multimodal": "phi3",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
# Models that have a language model's config inside, and are none.
_OTHER_MODELS = (
    "colpali",
    "grounding-dino",
    "mm-grounding-dino",
    "pe_audio",
    "pe_audio_video",
    "pe_video",
    "vision-text-dual-encoder",
)


def architecture_from_config(config: Config, name: str) -> Architecture:
    """The model that a config.json describes; of one of text and images the language model, with the tower before it where that
    is known. Raises UsageError for a type that is not known or a key that is missing.
    """
    if config.get("model_type") in _OTHER_MODELS:
        raise UsageError(
            f"{name!r} is a {config['model_type']}, which is no language model.",
            hint="write a TOML file of the shapes of its layers (docs/estimate.md).",
        )
    try:
        return with_images(config, _language_model(text_of(config), name))
    except KeyError as error:
        raise UsageError(f"{name!r} has no {error.args[0]!r}.", hint="it is no whole config.json.") from error


def _language_model(config: Config, name: str) -> Architecture:
    given = config.get("model_type")
    kind = _ALIKE.get(given, given) if isinstance(given, str) else None
    reader = _READERS.get(kind) if kind is not None else None
    if reader is None:
        if isinstance(given, str) and (reason := why_not(given)) is not None:
            raise UsageError(
                f"model_type {given!r} of {name!r} cannot be described here: {reason}.",
                hint="write a TOML file of a model of about that shape (docs/estimate.md).",
            )
        raise UsageError(
            f"model_type {given!r} of {name!r} is not known.",
            hint=f"known are {', '.join(sorted({*_READERS, *_ALIKE}))}; or write a TOML file of the shapes (docs/estimate.md).",
        )
    config = {**with_defaults(str(kind), config), "model_type": kind}
    found = with_windows(config, reader(config, name))
    return dataclasses.replace(found, code=found.code or code_of(config, found))
