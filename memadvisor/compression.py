"""How a plan makes the messages between ranks smaller, and how many bytes that leaves. Pure data.

Quantised messages hold one whole number of a few bits for each element, and a float32 scale for each block of
`BLOCK_ELEMENTS` elements that follow each other (engines/quantise.py). ZeRO++ (arXiv:2306.10209) calls quantised
gathers of parameters qwZ, and quantised reductions of gradients qgZ.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from memadvisor.errors import PlanError

BLOCK_ELEMENTS = 256
_SCALE_BYTES = 4
_ALIGNMENT_BYTES = 4  # a scale begins every message


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """What the messages of a plan hold instead of the numbers themselves. None: the numbers themselves.

    `gather_bits`: 8; of each element of the parameters that stage 3 gathers in training passes. `reduce_bits`: 8 or
    4; of each element of the gradients that stages 2 and 3 reduce to shards; they are added up in float32. Both are of parameters that
    are float32 in the script; others travel as they are. What the optimizer keeps and updates is never rounded.
    """

    gather_bits: int | None = None
    reduce_bits: int | None = None

    @property
    def is_lossy(self) -> bool:
        """Whether anything is rounded that would not be without it."""
        return self != UNCOMPRESSED

    @property
    def least_stage(self) -> int:
        """The lowest ZeRO stage that every unit must have."""
        if self.gather_bits is not None:
            return 3
        return 2 if self.reduce_bits is not None else 0

    def gather_bits_of(self, dtype: str) -> int | None:
        """Of gathered copies of a parameter that is `dtype` in the script; None where it travels as it is."""
        return self.gather_bits if dtype == "float32" else None

    def reduce_bits_of(self, dtype: str) -> int | None:
        """Of the gradient of such a parameter, where it becomes shards."""
        return self.reduce_bits if dtype == "float32" else None


UNCOMPRESSED = Compression()


def packed_bytes(num_elements: int, bits: int) -> int:
    """A quantised message: the scales of its blocks, the numbers, and padding to a whole scale."""
    num_blocks = -(-num_elements // BLOCK_ELEMENTS)
    size_bytes = num_blocks * _SCALE_BYTES + -(-num_elements * bits // 8)
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def scratch_elements(num_elements: int) -> int:
    """float32 elements of scratch with which a message is made where the tensor itself cannot be used up.

    Stretches of it stay in a processor's cache, and yet are at most 16 of a large message, each of which costs a
    GPU a few launches.
    """
    sixteenth = -(-num_elements // (16 * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
    return min(num_elements, max(2**16, sixteenth))


def compression_text(compression: Compression) -> str:
    """In a few words that follow others, after a comma: `, gathers in 8 bits`; nothing without compression."""
    return "".join(
        f", {what} in {bits} bits"
        for what, bits in (("gathers", compression.gather_bits), ("reduces", compression.reduce_bits))
        if bits is not None
    )


def compression_loss_text(compression: Compression) -> str:
    """What is rounded, in words."""
    rounded = []
    if compression.gather_bits is not None:
        rounded.append(f"gathered parameters are rounded to {compression.gather_bits} bits")
    if compression.reduce_bits is not None:
        rounded.append(
            f"gradients are rounded to {compression.reduce_bits} bits before each sum over the ranks"
        )
    return (
        f"{' and '.join(rounded)}, with a scale for each {BLOCK_ELEMENTS} elements; what the optimizer keeps stays as it is. "
        "Losses will differ from those without it."
    )


def check_compression(
    compression: Compression,
    num_ranks: int,
    stages: Collection[int],
    source: str,
    reduce_dtype: str | None = None,
) -> None:
    """Raise PlanError, naming `source`, where it cannot be had, or where there is nothing to compress.

    `reduce_dtype`: of the plan's precision.
    """
    if compression.reduce_bits is not None and reduce_dtype not in (None, "float32"):
        raise PlanError(
            f"{source} has both reduce_bits and reduce_dtype {reduce_dtype}.",
            hint="quantised gradients are summed in float32: leave one of them out.",
        )
    kinds = {"gather_bits": ((8,), 3, "stage 3"), "reduce_bits": ((4, 8), 2, "stage 2 or 3")}
    found = 0 if num_ranks == 1 else min(stages)
    for field, (allowed, stage, needed) in kinds.items():
        bits = getattr(compression, field)
        if bits is None:
            continue
        if bits not in allowed:
            raise PlanError(f"{source} has {field} {bits}.", hint=f"use {' or '.join(map(str, allowed))}.")
        if found < stage:
            where = "one rank" if num_ranks == 1 else f"ZeRO stage {found}"
            raise PlanError(
                f"{source} has {field} {bits} with {where}.",
                hint=f"it needs several ranks and {needed} for every unit.",
            )
