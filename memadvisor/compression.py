"""How a plan makes the messages between ranks smaller, and how many bytes that leaves. Pure data.

Quantised messages hold one whole number of a few bits for each element, and a float32 scale for each block of
`BLOCK_ELEMENTS` elements that follow each other (engines/collectives/quantise.py). ZeRO++ (arXiv:2306.10209) calls quantised
gathers of parameters qwZ, and quantised reductions of gradients qgZ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from memadvisor.errors import PlanError

BLOCK_ELEMENTS = 256
_SCALE_BYTES = 4
_ALIGNMENT_BYTES = 4  # a scale begins every message


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """What the messages of a plan hold instead of the numbers themselves. None: the numbers themselves.

    `gather_bits`: 8; of each element of the parameters that stage 3 gathers in training passes. `reduce_bits`: 8 or 4; of
    each element of the gradients that stages 2 and 3 reduce to shards; they are added up in float32. Both are of
    parameters that are float32 in the script; others travel as they are. What the optimizer keeps and updates is never
    rounded.

    `all_reduce_bits`, `all_reduce_top`: of the gradients that stages 0 and 1 sum whole, 1, 4 or 8 bits of each element,
    or so many elements of each block, exactly; what is not sent is added to the next step's (error feedback).
    `all_reduce_rank`: of the same, each matrix as a product of two that have so many columns, with error feedback too.
    """

    gather_bits: int | None = None
    reduce_bits: int | None = None
    all_reduce_bits: int | None = None
    all_reduce_top: int | None = None
    all_reduce_rank: int | None = None

    @property
    def is_lossy(self) -> bool:
        """Whether anything is rounded that would not be without it."""
        return self != UNCOMPRESSED

    @property
    def stages(self) -> range:
        """The ZeRO stages that every unit must have one of."""
        if self.has_feedback:
            return range(2)
        if self.gather_bits is not None:
            return range(3, 4)
        return range(2, 4) if self.reduce_bits is not None else range(4)

    @property
    def has_feedback(self) -> bool:
        """Whether gradients that stay whole are compressed, and each rank keeps what it has not sent."""
        given = (self.all_reduce_bits, self.all_reduce_top, self.all_reduce_rank)
        return any(value is not None for value in given)

    def gather_bits_of(self, dtype: str) -> int | None:
        """Of gathered copies of a parameter that is `dtype` in the script; None where it travels as it is."""
        return self.gather_bits if dtype == "float32" else None

    def reduce_bits_of(self, dtype: str) -> int | None:
        """Of the gradient of such a parameter, where it becomes shards."""
        return self.reduce_bits if dtype == "float32" else None

    def all_reduce_message_bytes(self, num_elements: int) -> int:
        """Of one rank's part of a gradient that stays whole."""
        if self.all_reduce_bits is not None:
            return packed_bytes(num_elements, self.all_reduce_bits)
        return sparse_bytes(num_elements, self.all_reduce_top or 0)


UNCOMPRESSED = Compression()


def packed_bytes(num_elements: int, bits: int) -> int:
    """A quantised message: the scales of its blocks, the numbers, and padding to a whole scale."""
    num_blocks = -(-num_elements // BLOCK_ELEMENTS)
    size_bytes = num_blocks * _SCALE_BYTES + -(-num_elements * bits // 8)
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def sparse_bytes(num_elements: int, top: int) -> int:
    """A message of the `top` largest elements of each block: a float32 each, and its place in the block in a byte."""
    whole, rest = divmod(num_elements, BLOCK_ELEMENTS)
    size_bytes = (whole * top + min(rest, top)) * (_SCALE_BYTES + 1)
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def thin_matrix(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Rows and columns of a parameter as the matrix that PowerSGD sends as two thin ones of `rank` columns.

    None where those would have more than half of its elements: then it is sent as it is.
    """
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)
    return (rows, columns) if 0 < 2 * rank * (rows + columns) <= rows * columns else None


def thin_elements(shapes: Iterable[Sequence[int]], rank: int) -> tuple[int, int]:
    """Elements of the two messages that stand for the gradients of parameters of these shapes (low_rank.py)."""
    first = second = 0
    for shape in shapes:
        sides = thin_matrix(shape, rank)
        first += math.prod(shape) if sides is None else sides[0] * rank
        second += 0 if sides is None else sides[1] * rank
    return first, second


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
        for what, bits in (
            ("gathers", compression.gather_bits),
            ("reduces", compression.reduce_bits),
            ("all-reduces", compression.all_reduce_bits),
        )
        if bits is not None
    ) + (
        f", all-reduces {compression.all_reduce_top} of {BLOCK_ELEMENTS} elements"
        if compression.all_reduce_top is not None
        else f", all-reduces of rank {compression.all_reduce_rank}"
        if compression.all_reduce_rank is not None
        else ""
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
    feedback = "what is not sent is added to the next step's. Losses will differ from those without it."
    if compression.all_reduce_bits is not None:
        bits = f"{compression.all_reduce_bits} bit{'s' * (compression.all_reduce_bits > 1)}"
        return f"gradients are sent in {bits} an element, with a scale for each {BLOCK_ELEMENTS}; {feedback}"
    if compression.all_reduce_top is not None:
        top = compression.all_reduce_top
        return f"of each {BLOCK_ELEMENTS} elements of a gradient the {top} largest are sent; {feedback}"
    if compression.all_reduce_rank is not None:
        rank = compression.all_reduce_rank
        return f"gradients of matrices are sent as products of two that have {rank} column{'s' * (rank > 1)}; {feedback}"
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
    allowed = {
        "gather_bits": (8,),
        "reduce_bits": (4, 8),
        "all_reduce_bits": (1, 4, 8),
        "all_reduce_top": range(1, 65),
        "all_reduce_rank": range(1, 65),
    }
    needed = {"gather_bits": "stage 3", "reduce_bits": "stage 2 or 3"}
    given = {field: value for field in allowed if (value := getattr(compression, field)) is not None}
    if compression.has_feedback and len(given) > 1:
        raise PlanError(f"{source} has both {' and '.join(given)}.", hint="leave one of them out.")
    for field, value in given.items():
        if value not in allowed[field]:
            raise PlanError(f"{source} has {field} {value}.", hint=f"use {_words(allowed[field])}.")
        own = Compression(**{field: value}).stages
        found = min(stages) if min(stages) not in own else max(stages)
        if num_ranks == 1 or found not in own:
            where = "one rank" if num_ranks == 1 else f"ZeRO stage {found}"
            raise PlanError(
                f"{source} has {field} {value} with {where}.",
                hint=f"it needs several ranks and {needed.get(field, 'stage 0 or 1')} for every unit.",
            )


def _words(allowed: Sequence[int]) -> str:
    if isinstance(allowed, range):
        return f"{allowed[0]} to {allowed[-1]}"
    return " or ".join(map(str, allowed))
