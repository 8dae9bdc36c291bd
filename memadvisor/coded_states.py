"""Optimizer state in 8 bits between updates: which of it may be, and how many bytes that takes. Pure data.

A coded tensor is one byte for each element, and a float32 scale for each block of `BLOCK_ELEMENTS` that follow each
other (engines/lanes/dynamic_code.py). That is 1.016 bytes an element in the place of 4.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from memadvisor.compression import BLOCK_ELEMENTS, packed_bytes
from memadvisor.errors import PlanError

LEAST_ELEMENTS = 4096  # of a parameter whose state is coded: of smaller ones there is little to gain

# Of the magnitude of an element beside its block's largest, codes are looked up by the exponent down to 2**-EXPONENTS,
# and by so many bits of the mantissa: one table of codes, two of them for the signed code, and the values of all codes
# (engines/lanes/dynamic_code.py).
EXPONENTS = 24
MANTISSA_BITS = 11
NUM_PLACES = ((EXPONENTS + 1) << MANTISSA_BITS) + 1  # the last is that of 1
TABLES_BYTES = 1 + 3 * NUM_PLACES + 2 * 256 * 4

# Of the classes that update element by element. ASGD's `ax` is the result of its training, the mean of the weights.
_CODED = {
    *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
    *("sum", "square_avg", "acc_delta", "prev", "step_size"),
}
_DTYPES = ("float32", "bfloat16", "float16")  # what a float32 scale has the range of
# A variance that is the difference of two averages (RMSprop's `centered`): rounded, it may be less than nothing.
_DIFFERENCES = {"square_avg", "grad_avg"}


def is_coded(component: str, others: Collection[str], dtype: str, num_elements: int) -> bool:
    """Whether a state with an element for each one of a parameter's may be coded.

    `component`: its key (`exp_avg`). `others`: all keys of that parameter's state. `num_elements`: of the whole
    parameter, whatever piece of it a rank has.
    """
    if set(others) >= _DIFFERENCES and component in _DIFFERENCES:
        return False
    return component in _CODED and dtype in _DTYPES and num_elements >= LEAST_ELEMENTS


def coded_bytes(num_elements: int) -> int:
    """Of one coded tensor: codes and scales."""
    return packed_bytes(num_elements, 8)


def stretch_elements(num_elements: int, device: str) -> int:
    """How many elements of a tensor are coded at once: what stays in a processor's cache, or what keeps a GPU busy."""
    most = 2**16 if device.startswith("cpu") else 2**20
    return min(num_elements, most)


def scratch_bytes(num_elements: int, device: str) -> int:
    """Beside a tensor and its codes while it is coded: a float32, an index of 4 bytes and a bool for each element of the
    first stretch, and 17 bytes for each block of one: its range, or where its table begins. Of the stretch before, what was
    found of its blocks is there meanwhile, 5 bytes of each."""
    first = stretch_elements(num_elements, device)
    if first > BLOCK_ELEMENTS:  # whole blocks
        first -= first % BLOCK_ELEMENTS
    second = min(first, num_elements - first)
    first_blocks, second_blocks = -(-first // BLOCK_ELEMENTS), -(-second // BLOCK_ELEMENTS)
    return 9 * first + max(17 * first_blocks, 5 * first_blocks + 17 * second_blocks)


def optimizer_bits_text(bits: int) -> str:
    """What is rounded, in words."""
    return (
        f"optimizer state of parameters of {LEAST_ELEMENTS} elements and more is kept in {bits} bits an element between "
        f"updates, with a scale for each {BLOCK_ELEMENTS}. Losses will differ from those without it."
    )


def check_optimizer_bits(bits: Collection[int], beside: Mapping[str, bool], source: str) -> None:
    """Raise PlanError, naming `source`, where state cannot be kept so. `beside`: what excludes it, if the plan asks for that."""
    wrong = [one for one in bits if one != 8]
    if wrong:
        raise PlanError(f"{source} has optimizer_bits {wrong[0]}.", hint="use 8.")
    asked = [what for what, is_asked in beside.items() if is_asked]
    if bits and asked:
        raise PlanError(
            f"{source} keeps optimizer state in 8 bits, and {asked[0]}.",
            hint="leave one of them out.",
        )
