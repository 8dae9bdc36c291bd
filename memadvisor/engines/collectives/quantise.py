"""Rounding a tensor to a few bits an element, with a scale for each block, and back again.

Of a block of `BLOCK_ELEMENTS` elements that follow each other (the last one of a tensor may be shorter) the scale
is its largest magnitude divided by the largest code, 127 of 8 bits and 7 of 4, and each element's code is the
whole number nearest to element / scale, ties to even. So

- what comes back differs from what went in by at most half a scale (but for float32's own rounding of the
  product), zeros come back as zeros, and the largest of a block as itself but for that rounding;
- a block with an infinity or a NaN comes back as NaNs, so an overflow is still an overflow;
- a block whose scale would be no normal float32 (magnitudes below 1.5e-36) comes back as zeros.

Of 1 bit, the scale is the mean magnitude of the block, and each element becomes plus or minus it (0 plus it, but
for a block of zeros): far off, and meant for those who add what is missing to what they send next.

A packed message is float32 scales, then codes: int8; or two of 4 bits in a byte, the earlier element in its lower half,
each with 8 added; or eight of 1 bit, 1 for plus, the earliest element lowest. The same input makes the same bytes, and
the same bytes make the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from memadvisor.compression import BLOCK_ELEMENTS, packed_bytes, scratch_elements

_LARGEST_CODE = {8: 127, 4: 7, 1: 1}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some whole blocks of a tensor: `elements` and `codes` are 1-D, `scales` has one element a block."""

    elements: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    room: torch.Tensor  # float32 scratch, one element for each of `elements`


def quantise(values: torch.Tensor, packed: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    """Write 1-D `values` into `packed`, uint8 of `packed_bytes`.

    `scratch`: float32, of as many elements, and then it may be `values`, which is used up; or of
    `scratch_elements`.
    """
    for stretch in _stretches(values, packed, bits, scratch):
        room, scales = stretch.room, stretch.scales
        blocks = _blocks(stretch.elements)
        if bits == 1:
            torch.linalg.vector_norm(blocks, 1, dim=1, out=scales).div_(blocks.shape[1])
        else:
            torch.maximum(blocks.amax(1).float(), blocks.amin(1).neg_().float(), out=scales)
        scales.masked_fill_(~scales.isfinite(), torch.nan).div_(_LARGEST_CODE[bits])
        scales.masked_fill_(scales < _SMALLEST_SCALE, 0)
        if bits == 1:
            _pack_signs(stretch.elements, stretch.codes)
            continue
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0)
        if room.data_ptr() != stretch.elements.data_ptr():
            room.copy_(stretch.elements)
        _blocks(room).mul_(inverse[:, None]).round_()
        if bits == 8:
            stretch.codes.copy_(room)
        else:
            low, high = room[0::2], room.add_(8)[1::2]
            low[: len(high)].add_(high, alpha=16)
            stretch.codes.copy_(low)


def dequantise(
    packed: torch.Tensor,
    values: torch.Tensor,
    bits: int,
    scratch: torch.Tensor | None = None,
    *,
    add: bool = False,
) -> None:
    """Write what `packed` stands for into 1-D `values`, or `add` it to them.

    Where they are not float32, or are added to, with `scratch` of `scratch_elements`.
    """
    for stretch in _stretches(values, packed, bits, values if scratch is None else scratch):
        room, codes = stretch.room, stretch.codes
        if bits == 8:
            room.copy_(codes)
        elif bits == 1:
            _unpack_signs(codes, room)
        else:
            low, high = room[0::2], room[1::2]
            high.copy_(codes[: len(high)]).div_(16).floor_()
            low.copy_(codes)[: len(high)].sub_(high, alpha=16)
            room.sub_(8)
        _blocks(room).mul_(stretch.scales[:, None])
        if add:
            stretch.elements.add_(room)
        elif room.data_ptr() != stretch.elements.data_ptr():
            stretch.elements.copy_(room)


def _pack_signs(elements: torch.Tensor, codes: torch.Tensor) -> None:
    codes.zero_()
    for place in range(8):
        signs = elements[place::8] >= 0
        codes[: len(signs)].add_(signs, alpha=2**place)


def _unpack_signs(codes: torch.Tensor, room: torch.Tensor) -> None:
    for place in range(8):
        part = room[place::8]
        part.copy_(codes[: len(part)].bitwise_and(2**place)).div_(2 ** (place - 1)).sub_(1)


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """What comes back of 1-D `values`."""
    packed = torch.empty(packed_bytes(values.numel(), bits), dtype=torch.uint8, device=values.device)
    back = values.clone()
    quantise(back, packed, bits, back)
    dequantise(packed, back, bits)
    return back


def _stretches(
    values: torch.Tensor, packed: torch.Tensor, bits: int, scratch: torch.Tensor
) -> Iterator[_Stretch]:
    """Cut a tensor and its message into what fits the scratch; blocks of one stretch are of one length."""
    count = values.numel()
    num_blocks = -(-count // BLOCK_ELEMENTS)
    if packed.numel() != packed_bytes(count, bits):
        raise AssertionError(f"{packed.numel()} bytes are no message of {count} elements of {bits} bits")
    scales = packed[: 4 * num_blocks].view(torch.float32)
    codes = packed[4 * num_blocks :]
    codes = codes.view(torch.int8) if bits == 8 else codes
    per_byte = 8 // bits
    whole = count // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    step = max(BLOCK_ELEMENTS, scratch_elements(count) // BLOCK_ELEMENTS * BLOCK_ELEMENTS)
    edges = [*range(0, whole, step), whole]
    if count > whole:
        edges.append(count)
    for start, end in pairwise(edges):
        room = scratch[start:end] if scratch.numel() == count else scratch[: end - start]
        yield _Stretch(
            values[start:end],
            codes[start // per_byte : -(-end // per_byte)],
            scales[start // BLOCK_ELEMENTS : -(-end // BLOCK_ELEMENTS)],
            room,
        )


def _blocks(stretch: torch.Tensor) -> torch.Tensor:
    return stretch.view(-1, min(BLOCK_ELEMENTS, stretch.numel()))
