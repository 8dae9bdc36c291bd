"""Vision transformers, by name: encoders of an image's patches and one more token, with a classifier.

Counted as encoders of tokens: the table of tokens stands for the projection of patches, which has about as many
parameters, and the head is over every token, not over the first alone.
"""

from __future__ import annotations

import dataclasses

from memadvisor.architecture import Architecture, ReferenceCode

_CLASSES = 1000  # ImageNet's


def _vit(
    name: str, n_layers: int, hidden: int, n_heads: int, ffn: int, patch: int, pixels: int = 224
) -> Architecture:
    """Of images of so many pixels a side, in patches of `patch`."""
    return Architecture(
        name=name,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=hidden // n_heads,
        ffn=ffn,
        vocab=_CLASSES,
        tied_embeddings=False,
        gated_mlp=False,
        positions=(pixels // patch) ** 2 + 1,
        biases=True,
        norm_vectors=2,
        causal=False,
        head_bias=True,
    )


_DINOV2 = ReferenceCode(fp32_softmax=False)
# timm's and DeiT's names (arXiv:2012.12877, table 1; timm/models/vision_transformer.py): vit_base_patch16_384.
_TIMM = {
    "tiny": (12, 192, 3, 768),
    "small": (12, 384, 6, 1536),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "huge": (32, 1280, 16, 5120),
    "giant": (40, 1408, 16, 6144),
}
# Those that load.py has as other names of the first ones below.
_OTHERWISE_NAMED = (("vit", "base", 16, 224), ("vit", "large", 16, 224), ("vit", "huge", 14, 224))


def _of_timm() -> tuple[Architecture, ...]:
    return tuple(
        _vit(f"{family}-{size}-patch{patch}-{pixels}", *shape, patch, pixels)
        for family in ("vit", "deit")
        for size, shape in _TIMM.items()
        for patch in (8, 14, 16, 32)
        for pixels in (224, 384)
        if pixels % patch == 0 and (family, size, patch, pixels) not in _OTHERWISE_NAMED
    )


VISION_TRANSFORMERS = (
    # arXiv:2010.11929, table 1.
    _vit("vit-b-16", 12, 768, 12, 3072, 16),
    _vit("vit-b-32", 12, 768, 12, 3072, 32),
    _vit("vit-l-16", 24, 1024, 16, 4096, 16),
    _vit("vit-l-32", 24, 1024, 16, 4096, 32),
    _vit("vit-h-14", 32, 1280, 16, 5120, 14),
    # arXiv:2106.04560, table 2: g/14 and G/14, which case alone would tell apart.
    _vit("vit-giant-14", 40, 1408, 16, 6144, 14),
    _vit("vit-gigantic-14", 48, 1664, 16, 8192, 14),
    # arXiv:2302.05442, table 1; norms over queries and keys, and biases of the MLP alone.
    dataclasses.replace(_vit("vit-22b", 48, 6144, 48, 24576, 14), biases=False, mlp_biases=True, qk_norm=256),
    # arXiv:2304.07193, appendix B: gated in the giant one, a scale of each part's result in all.
    *(
        dataclasses.replace(_vit(f"dinov2-{size}", *_TIMM[size], 14), norm_vectors=3, code=_DINOV2)
        for size in ("small", "base", "large")
    ),
    dataclasses.replace(
        _vit("dinov2-giant", 40, 1536, 24, 4096, 14), gated_mlp=True, norm_vectors=3, code=_DINOV2
    ),
    *_of_timm(),
)
_BY_NAME = {each.name: each for each in VISION_TRANSFORMERS}


def image_tokens(model: Architecture) -> int | None:
    """Tokens of an image, of a vision transformer by its name; None for other models."""
    known = _BY_NAME.get(model.name)
    return None if known is None else known.positions
