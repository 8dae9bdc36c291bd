"""Transformers over patches out of a Hugging Face config.json: of images and of spectrograms, each with a classifier.

Counted as encoders of tokens, as vision_transformers.py has those by name: the head is over every token, not over the first alone,
and of a table of tokens, which there is none of, what the patches' projection has more or fewer parameters is put right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_shapes import base
from memadvisor.architectures.config_values import Config, whole
from memadvisor.errors import UsageError

_LABELS = 2  # PreTrainedConfig's, where it names none


def _labels(config: Config) -> int:
    named = config.get("id2label")
    return (
        len(named) if isinstance(named, Mapping) and named else whole(config, "num_labels", default=_LABELS)
    )


def _sides(config: Config, key: str, default: int) -> tuple[int, int]:
    """Of a rectangle: one number for both, or a list of two."""
    value = config.get(key)
    each = value if isinstance(value, list) and len(value) == 2 else [value, value]
    first, second = (whole({key: one}, key, default=default) for one in each)
    return first, second


def _encoder(
    config: Config, name: str, *, patches: int, patch_size: int, channels: int, more_tokens: int
) -> Architecture:
    """`patch_size`: elements of one in each channel. `more_tokens`: beside the patches, each with a vector of its own."""
    labels = _labels(config)
    has_qkv = bool(config.get("qkv_bias", True))
    found = base({**config, "vocab_size": labels, "num_key_value_heads": None}, name, gated=False, tied=False)
    hidden = found.hidden
    around = (channels * patch_size + 1 + more_tokens) * hidden
    return dataclasses.replace(
        found,
        tied_embeddings=False,
        biases=has_qkv,
        output_bias=not has_qkv,
        mlp_biases=not has_qkv,
        norm_vectors=2,
        causal=False,
        positions=patches + more_tokens,
        head_bias=True,
        around=around - labels * hidden,
    )


def _of_images(more_tokens: int) -> Callable[[Config, str], Architecture]:
    def read(config: Config, name: str) -> Architecture:
        (height, width), (patch_height, patch_width) = (
            _sides(config, "image_size", 224),
            _sides(config, "patch_size", 16),
        )
        return _encoder(
            config,
            name,
            patches=(height // patch_height) * (width // patch_width),
            patch_size=patch_height * patch_width,
            channels=whole(config, "num_channels", default=3),
            more_tokens=more_tokens,
        )

    return read


def _dinov2(config: Config, name: str) -> Architecture:
    """A scale of each part's result, the giant one gated; a token for masked patches, registers without positions, and a classifier
    over the first token beside the patches' mean."""
    ratio = config.get("mlp_ratio", 4)
    if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or ratio <= 0:
        raise UsageError(f"mlp_ratio {ratio!r} of {name!r} is no positive number.")
    gated = bool(config.get("use_swiglu_ffn", False))
    inner = int(whole(config, "hidden_size", default=768) * ratio)
    if gated:
        inner = (int(inner * 2 / 3) + 7) // 8 * 8
    found = _of_images(1)({**config, "intermediate_size": inner}, name)
    has_registers = config.get("model_type") == "dinov2_with_registers"
    tokens = whole(config, "num_register_tokens", default=4, least=0) if has_registers else 0
    tokens += has_registers or bool(config.get("use_mask_token", True))
    # The last norm has no scale.
    around = found.around + (tokens + found.vocab - 1) * found.hidden
    return dataclasses.replace(found, gated_mlp=gated, norm_vectors=3, around=around)


def _of_spectrograms(config: Config, name: str) -> Architecture:
    """Patches overlap; a norm stands before the classifier."""
    size = whole(config, "patch_size", default=16)
    rows, columns = (
        (whole(config, of, default=usual) - size) // whole(config, stride, default=10) + 1
        for of, usual, stride in (
            ("num_mel_bins", 128, "frequency_stride"),
            ("max_length", 1024, "time_stride"),
        )
    )
    found = _encoder(config, name, patches=rows * columns, patch_size=size**2, channels=1, more_tokens=2)
    return dataclasses.replace(found, around=found.around + found.norm_parameters())


PATCH_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "audio-spectrogram-transformer": _of_spectrograms,
    "deit": _of_images(2),
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2,
    "ijepa": _of_images(0),
    "vit": _of_images(1),
    "vit_msn": _of_images(1),
}
