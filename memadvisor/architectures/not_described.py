"""Published models that an Architecture cannot say, and what of each it has no word for.

RWKV: Peng et al. 2023 to 2025 (arXiv:2305.13048, 2404.05892, 2503.14456). Gemma 3n, Gemma 4, DeepSeek-V4, Step-3 and MiMo-V2: their
classes' configurations (Hugging Face transformers; vLLM's step3_vl; NeMo AutoModel's deepseek_v4 and mimo_v2_flash). Swin: Liu et
al. 2021 (arXiv:2103.14030). CLIP: Radford et al. 2021 (arXiv:2103.00020). DiT: Peebles and Xie 2022 (arXiv:2212.09748); Stable
Diffusion 3: Esser et al. 2024 (arXiv:2403.03206).
"""

from __future__ import annotations

import re

_REASONS = tuple(
    (re.compile(names), reason)
    for names, reason in (
        (
            r"rwkv",
            "its layers mix tokens by decays that each token makes (WKV), which is none of the recurrences known",
        ),
        (
            r"gemma3n",
            "it has four streams side by side (AltUp), a table of tokens for each layer, and layers that share keys and values",
        ),
        (r"gemma4", "its layers that see all tokens have heads of another width than the others"),
        (r"mimov2", "its layers that see all tokens have other numbers of heads than those with a window"),
        (
            r"deepseekv4",
            "its layers have four streams that are mixed anew (hyper-connections), and keys that are compressed along the sequence",
        ),
        (
            r"step3(?!p5|\.5)",
            "its queries are made through few columns though its keys are not, and its last layer alone has no experts",
        ),
        (
            r"step3(p5|\.5)",
            "its layers that see all tokens have other numbers of heads than those with a window",
        ),
        (r"swin", "its stages are of different widths, with tokens merged between them"),
        (
            r"(open)?clip|siglip",
            "it is two towers, of images and of text, and a loss between all their pairs; an image tower alone is known as vit-l-14 and the like",
        ),
        (
            r"dit(xl|l|b|s)\d*|sd3(\.5)?|stablediffusion3|flux|pixart|mmdit",
            "its blocks are steered by the time step (adaLN), and have text and images side by side",
        ),
        (r"sdxl|stablediffusion|unet", "it is made of convolutions"),
    )
)


def why_not(name: str) -> str | None:
    """What keeps the model of that name (or model_type) from being described; None where nothing is known."""
    words = [
        re.sub(r"[^a-z0-9.]", "", part) for part in name.lower().split("/")
    ]  # of DiT-XL/2 the first part
    return next((reason for pattern, reason in _REASONS for word in words if pattern.match(word)), None)
