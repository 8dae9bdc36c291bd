"""A tensor in 8 bits an element: block-wise dynamic quantization, and back again.

Of a block of 256 elements that follow each other the scale is the one of largest magnitude, and each element's code is
the place of the value next to element / scale in a fixed table of 256 (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", arXiv:2110.02861: section 2.1 for blocks, 1.2 and 2.2 for the table). The table's magnitudes go down by
powers of ten, each decade with half as many values as the one above it, evenly spread: so there is a value near to large
elements, and one not far from small ones.

- A block without negative elements has the unsigned table, with twice the values of the signed one, which has as many of
  either sign. The last bit of the block's scale tells which it is, so nobody has to know what a state is.
- 0 comes back as 0, and the largest of a block as itself, but for that bit. What is above 0 in an unsigned block comes
  back above 0: an optimizer divides by such a state, and one that became 0 where the other did not would make a step
  without bounds.
- What comes back differs from x by at most half the distance of the two values around x / scale, times the scale (and
  2**-12 of x, since elements have 11 bits of a mantissa when they are looked up; or by the smallest value, where that
  keeps x from 0). Coded again, it comes back as it is: a state that has been saved and loaded is the state it was.
- A block with an infinity or a NaN comes back as NaNs; one whose largest magnitude is no normal float32, as zeros.

What is written: the scales, then the codes. No random numbers are drawn, and the same input makes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from memadvisor.coded_states import EXPONENTS, MANTISSA_BITS, NUM_PLACES, coded_bytes, stretch_elements
from memadvisor.compression import BLOCK_ELEMENTS

_DECADES = 7
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_NEGATIVE = (
    2.0**-40
)  # of the scale: what is less below 0 makes no block a signed one, and is 0 in an unsigned one
# The first bits of a float32, as a whole number, are its place in the table of codes. Magnitudes are brought so far
# down that those above 2**-EXPONENTS have exponents from 1 on, and all below are in the places before these.
_DOWN = 2.0 ** (EXPONENTS - 126)
_DROPPED_BITS = 23 - MANTISSA_BITS


def values_of(*, is_signed: bool) -> list[float]:
    """The 256 values of a table, ascending.

    Decade i, from 10**-(i + 1) to 10**-i, is cut into 2**f equal parts, whose middles are the values, where f is 6 - i for
    the signed table and 7 - i for the other; and there are 0 and 1.
    """
    magnitudes = []
    for decade in range(_DECADES):
        num_parts = 2 ** ((6 if is_signed else 7) - decade)
        width = 0.9 / num_parts
        magnitudes += [10.0**-decade * (0.1 + width * (part + 0.5)) for part in range(num_parts)]
    negative = [-magnitude for magnitude in magnitudes] if is_signed else []
    return sorted([*negative, 0.0, *magnitudes, 1.0])


class DynamicCode:
    """The tables, on a device, and what is done with them."""

    def __init__(self, device: torch.device) -> None:
        codes, values = _tables()
        self._codes, self._values = codes.to(device), values.to(device)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._codes, self._values

    def encode(self, values: torch.Tensor, coded: torch.Tensor) -> None:
        """Write 1-D `values` into `coded`, uint8 of `coded_bytes`."""
        for stretch in _stretches(values, coded):
            blocks = _blocks(stretch.elements)
            signed = _scale(blocks, stretch.scales)
            inverse = stretch.scales.reciprocal().nan_to_num_(0, posinf=0)
            room, places, above = (stretch.new(kind) for kind in (torch.float32, torch.int32, torch.bool))
            torch.mul(blocks, inverse[:, None], out=_blocks(room))
            torch.gt(room, 0, out=above)
            bits = room.mul_(_DOWN).add_(0.0).view(torch.int32)  # -0 is 0 then
            # Negative floats have their first bit set, and run down as their bits run up: made to run up, below zero.
            torch.bitwise_right_shift(bits, 31, out=places)
            places.bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).bitwise_right_shift_(_DROPPED_BITS)
            places.clamp_(-NUM_PLACES, NUM_PLACES - 1)  # what is no number is beyond
            _blocks(places).add_(torch.where(signed, 2 * NUM_PLACES + 1, 1).int()[:, None])
            torch.index_select(self._codes, 0, places, out=stretch.codes)
            torch.maximum(stretch.codes, above.view(torch.uint8), out=stretch.codes)

    def decode(self, coded: torch.Tensor, values: torch.Tensor) -> None:
        """Write what `coded` stands for into 1-D `values`."""
        for stretch in _stretches(values, coded):
            places = stretch.new(torch.int32)
            places.copy_(stretch.codes)
            signed = stretch.scales.view(torch.int32).bitwise_and(1)
            _blocks(places).add_(signed.mul_(256)[:, None])
            is_float32 = stretch.elements.dtype is torch.float32
            room = stretch.elements if is_float32 else stretch.new(torch.float32)
            torch.index_select(self._values, 0, places, out=room)
            _blocks(room).mul_(stretch.scales[:, None])
            if not is_float32:
                stretch.elements.copy_(room)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some whole blocks of a tensor (the last one may be shorter); `scales` has one element a block."""

    elements: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    scratch: dict[torch.dtype, torch.Tensor]

    def new(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory of as many elements, the same for all stretches of a tensor."""
        if dtype not in self.scratch:
            self.scratch[dtype] = torch.empty(self.elements.numel(), dtype=dtype, device=self.elements.device)
        return self.scratch[dtype][: self.elements.numel()]


def _stretches(values: torch.Tensor, coded: torch.Tensor) -> Iterator[_Stretch]:
    """Blocks of one stretch are of one length, and the first stretch is the longest."""
    count = values.numel()
    if coded.numel() != coded_bytes(count):
        raise AssertionError(f"{coded.numel()} bytes are no codes of {count} elements")
    num_blocks = -(-count // BLOCK_ELEMENTS)
    scales = coded[: 4 * num_blocks].view(torch.float32)
    codes = coded[4 * num_blocks :]
    whole = count // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    step = max(BLOCK_ELEMENTS, stretch_elements(count, values.device.type) // BLOCK_ELEMENTS * BLOCK_ELEMENTS)
    edges = [*range(0, whole, step), whole]
    if count > whole:
        edges.append(count)
    scratch: dict[torch.dtype, torch.Tensor] = {}
    for start, end in pairwise(edges):
        first, last = start // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS)
        yield _Stretch(values[start:end], codes[start:end], scales[first:last], scratch)


def _scale(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Write the scales of blocks, and tell which of these are signed."""
    highest, lowest = blocks.amax(1).float(), blocks.amin(1).float()
    torch.where(highest >= -lowest, highest, lowest, out=scales)
    magnitudes = scales.masked_fill_(~scales.isfinite(), torch.nan).abs()
    scales.masked_fill_(magnitudes < _SMALLEST_SCALE, 0)
    signed = ~(lowest >= -_NEGATIVE * magnitudes) & (scales != 0)  # where there is no number, too
    scales.view(torch.int32).bitwise_and_(-2).bitwise_or_(signed)
    return signed


def _blocks(stretch: torch.Tensor) -> torch.Tensor:
    return stretch.view(-1, min(BLOCK_ELEMENTS, stretch.numel()))


def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Codes by place, and values by code: of the unsigned table, then of the signed one.

    In the former, -0 and the magnitudes of the unsigned table are followed by the signed one's negative ones and its others.
    """
    unsigned, signed = (values_of(is_signed=is_signed) for is_signed in (False, True))
    above, zero = _codes_by_place(signed), signed.index(0.0)
    # The place of -m is -1 - (that of m), and the values of -m are those of m, but that there is no -1.
    below = (2 * zero - above.int()).clamp_(0, zero - 1).to(torch.uint8).flip(0)
    codes = torch.cat(
        [torch.zeros(1, dtype=torch.uint8, device="cpu"), _codes_by_place(unsigned), below, above]
    )
    return codes, torch.tensor([*unsigned, *signed], dtype=torch.float32, device="cpu")


def _codes_by_place(table: list[float]) -> torch.Tensor:
    """Of magnitudes: the code of the value next to the middle of what has each place."""
    bits = torch.arange(NUM_PLACES, dtype=torch.int32, device="cpu") << _DROPPED_BITS
    middles = (bits + (1 << (_DROPPED_BITS - 1))).view(torch.float32).double() / _DOWN
    halves = torch.tensor(
        [math.fsum(pair) / 2 for pair in pairwise(table)], dtype=torch.float64, device="cpu"
    )
    return torch.bucketize(middles, halves).to(torch.uint8)
