"""How activations are kept in a few bits until their backward, and how many bytes that leaves. Pure data.

An element is a whole number of `bits` bits between the smallest and the largest of its block of `BLOCK_ELEMENTS` that
follow each other in memory; each block has these two as float32 numbers, its smallest and the width of a step
(engines/activations/rounded.py; as ActNN, arXiv:2104.14129, section 3, and GACT, arXiv:2206.11357, have them). Masks are
one bit an element, which loses nothing.
"""

from __future__ import annotations

from memadvisor.compression import BLOCK_ELEMENTS, scratch_elements

BITS = (8, 4, 2)
MASK_BITS = 1
FLOATING = ("float32", "bfloat16", "float16", "float64")

# What has fewer elements than this part of the largest tensor that its unit is called with is a statistic (a norm's of
# each row, a squeezed channel's), and stays as it is: there is little to gain, and all elements of a row hang on it.
STATISTIC_SHARE = 32

_BLOCK_RANGE_BYTES = 8
# torch hands an operator on fewer than 2**15 elements of a CPU to one thread. Operators this short lose more by waiting
# for other threads than they gain, and on a busy machine a hundred times as much.
_CPU_STRETCH_ELEMENTS = 2**15 - BLOCK_ELEMENTS
# Numbers that a CPU's operators are given are tensors there: an addition to whole ones has its number as it was given,
# twice, and cast; a shift of codes has it as it was given and as one of them.
_CPU_ADDED_BYTES = 20
_CPU_SHIFTED_BYTES = 9


def rounded_bytes(num_elements: int, bits: int) -> int:
    """What a tensor takes; its last block is filled up to a whole one."""
    num_blocks = -(-num_elements // BLOCK_ELEMENTS)
    return num_blocks * (_BLOCK_RANGE_BYTES + BLOCK_ELEMENTS * bits // 8)


def rounding_scratch_bytes(num_elements: int, device: str) -> int:
    """What is beside a tensor and its codes while it is rounded: for each element of a stretch a float32 of itself, one
    of noise, two random bytes, and its code; for each block of it the inverse of its step."""
    numbers_bytes = _CPU_ADDED_BYTES if device == "cpu" else 0
    return (
        11 * stretch_elements(num_elements, device) + 4 * -(-num_elements // BLOCK_ELEMENTS) + numbers_bytes
    )


def restoring_scratch_bytes(num_elements: int, bits: int, dtype: str, device: str) -> int:
    """What is beside a tensor and its codes while it is brought back."""
    size = stretch_elements(num_elements, device)
    codes_bytes = size * bits // 8 if bits < 8 else 0
    if bits < 8 and device == "cpu":
        codes_bytes += _CPU_SHIFTED_BYTES
    return codes_bytes + 4 * (BLOCK_ELEMENTS if dtype == "float32" else size)


def stretch_elements(num_elements: int, device: str) -> int:
    """How many elements are worked on at once, whole blocks of them; `device` is "cpu" or any other."""
    most = -(-scratch_elements(num_elements) // BLOCK_ELEMENTS) * BLOCK_ELEMENTS
    return min(most, _CPU_STRETCH_ELEMENTS) if device == "cpu" else most


def rounding_text(bits: set[int]) -> str:
    """What is lossy, in words."""
    words = " and ".join(str(each) for each in sorted(bits, reverse=True))
    return (
        f"what autograd keeps of chosen units is rounded, by chance up or down, to {words} bits between forward and "
        f"backward, with a range for each {BLOCK_ELEMENTS} elements; parameters, masks, indices and statistics stay "
        "exact. Losses will differ from those without it."
    )
