"""Options of ZeRO++ (Wang et al. 2023, arXiv:2306.10209) by name, and the fields of a layout that they set."""

from __future__ import annotations

from math import gcd
from typing import TypedDict

from memadvisor.errors import UsageError
from memadvisor.layout import ZEROPP


class ZeroPP(TypedDict):
    """The fields of a Layout that options of ZeRO++ set."""

    secondary_shard: int | None
    quantized_weights: bool
    quantized_gradients: bool


def zeropp_fields(names: tuple[str, ...], *, shard_ranks: int, tensor: int, per_node: int) -> ZeroPP:
    """Of options by name; hpZ's copy is shared by those of `shard_ranks` ranks that are in one node of `per_node`."""
    return ZeroPP(
        secondary_shard=gcd(shard_ranks, max(1, per_node // tensor)) if "hpz" in names else None,
        quantized_weights="qwz" in names,
        quantized_gradients="qgz" in names,
    )


def zeropp_names(text: str | None) -> tuple[str, ...]:
    """Options of ZeRO++ from a list such as `hpz,qwz`, each once. Raises UsageError for anything else."""
    said = [] if text is None else [word.strip().lower() for word in text.replace("+", ",").split(",")]
    for word in said:
        if word not in ZEROPP:
            raise UsageError(f"{word!r} is no option of ZeRO++.", hint=f"they are {', '.join(ZEROPP)}.")
    return tuple(name for name in ZEROPP if name in said)
