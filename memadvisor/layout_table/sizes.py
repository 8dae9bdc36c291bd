"""A shape for a model of which a row says no more than how large it is: `7B`, `GPT-22B`, a number of parameters.

The published model of that kind whose nominal size is next; between two of them, their width and depth in proportion.
"""

from __future__ import annotations

import dataclasses
import math

from memadvisor.architecture import Architecture
from memadvisor.architectures.load import named_architecture

# Nominal sizes in 10^9 of the best known of each kind.
_GATED = {
    1.1: "tinyllama-1.1b", 1.2: "llama3.2-1b", 3.2: "llama3.2-3b", 7.0: "llama2-7b", 8.0: "llama3-8b", 13.0: "llama2-13b",
    33.0: "llama-33b", 34.0: "llama2-34b", 65.0: "llama-65b", 70.0: "llama2-70b", 405.0: "llama3-405b",
}  # fmt: skip
_PLAIN = {
    0.125: "gpt3-125m", 0.35: "gpt3-350m", 0.76: "gpt3-760m", 1.3: "gpt3-1.3b", 1.5: "gpt2-xl", 1.7: "megatron-1.7b", 2.7: "gpt3-2.7b",
    3.6: "megatron-3.6b", 6.7: "gpt3-6.7b", 7.5: "megatron-7.5b", 8.3: "megatron-8.3b", 13.0: "gpt3-13b", 18.4: "megatron-18.4b",
    22.0: "megatron-22b", 39.1: "megatron-39.1b", 76.1: "megatron-76.1b", 145.6: "megatron-145.6b", 175.0: "gpt3-175b",
    310.1: "megatron-310.1b", 530.0: "megatron-530b", 1008.0: "megatron-1t",
}  # fmt: skip
_SAME = 0.06  # of a size: 7 for 6.7, 30 for 32
_HEAD = 128
_DEPTH = 8  # layers that pipelines divide


def architecture_of_size(billions: float, gated: bool | None) -> Architecture:
    """`gated`: of which kind, None where nobody says: then that of which a model has just that size, a Llama where both do."""
    kinds = (_GATED, _PLAIN) if gated is None else (_GATED if gated else _PLAIN,)
    off = {name: abs(math.log(billions / size)) for sizes in kinds for size, name in sizes.items()}
    nearest = min(off, key=lambda name: off[name])
    found = named_architecture(nearest)
    assert found is not None
    return found if off[nearest] <= _SAME else _between(billions, kinds[0])


def _between(billions: float, sizes: dict[float, str]) -> Architecture:
    """Of that size: depth in proportion (of logarithms) to the two next to it, width by what is left."""
    under = max((size for size in sizes if size <= billions), default=min(sizes))
    over = min((size for size in sizes if size > under), default=under)
    low, high = named_architecture(sizes[under]), named_architecture(sizes[over])
    assert low is not None and high is not None
    share = math.log(billions / under) / math.log(over / under) if over > under else 0.0
    share = min(1.0, max(0.0, share))
    like = high if share > 0.5 else low
    n_layers = low.n_layers * (high.n_layers / low.n_layers) ** share
    n_layers = max(_DEPTH, round(n_layers / _DEPTH) * _DEPTH)
    # 12 layers hidden^2 (Kaplan et al. 2020, arXiv:2001.08361, table 1), and the tables of tokens.
    tables = like.vocab * (1 if like.tied_embeddings else 2)
    root = math.sqrt(tables**2 + 48 * n_layers * billions * 1e9)
    hidden = max(_HEAD, round((root - tables) / (24 * n_layers) / _HEAD) * _HEAD)
    n_heads = hidden // _HEAD
    return dataclasses.replace(
        like,
        name=f"{billions:g}b",
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=_HEAD,
        ffn=-(-8 * hidden // (3 * 256)) * 256 if like.gated_mlp else 4 * hidden,
    )
