"""Activations in a few bits an element: rounding a storage, and bringing it back.

A block is `BLOCK_ELEMENTS` elements that follow each other. Of each, `lowest` is its smallest element, `step` the
difference to its largest by the largest code, 2**bits - 1, and an element's code is (element - lowest) / step rounded to
the whole number above or below it, each as likely as it is near (stochastic rounding). So (ActNN, arXiv:2104.14129,
section 3; GACT, arXiv:2206.11357, section 4)

- what comes back, lowest + code * step, is on average what went in, and less than a step away, but for float32's own
  rounding; it is never outside of its block's range, and its smallest element comes back as itself;
- a gradient that is linear in it is on average what it was.

Of a ReLU's result code 0 is what is not positive, and the rest begin at 1: (element / step, rounded) + 1, of a step that
is the largest by 2**bits - 2. For its backward asks of each element whether it is positive, and the next layer's how
large it is; code 1 comes back as just above zero, by a millionth of a step.

A mask is what holds two values alone; its codes are 0 and 1, and it comes back as it was.

Packed: `lowest` of all blocks, then `step`, then the codes. With k codes in a byte, a block is k parts of its elements;
the byte has the first part's code in its lowest bits. The last block is filled up with the last element.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch

from memadvisor.activation_bits import MASK_BITS, rounded_bytes, stretch_elements
from memadvisor.compression import BLOCK_ELEMENTS

_SMALLEST_STEP = torch.finfo(torch.float32).tiny
_JUST_ABOVE_ZERO = {torch.float16: 2.0**-10}  # of a step; in float16 less would often be zero
_LEAST_BLOCK = 32  # torch's own minimum over a block is slow, and halves of blocks are not


class Noise:
    """Where the roundings of one device get their chances: of the same seed, the same ones; never the script's."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, noise: torch.Tensor) -> None:
        """With multiples of 2**-16 from 0 on and below 1: added to a code of 8 bits, no float32 rounds them up to 1."""
        raw = torch.empty(-(-noise.numel() // 4), dtype=torch.int64, device=noise.device)
        raw.random_(-(2**63), None, generator=self._generator)
        noise.copy_(raw.view(torch.int16)[: noise.numel()]).add_(2**15).mul_(2.0**-16)


def rounded(values: torch.Tensor, bits: int, noise: Noise, *, is_relu: bool = False) -> torch.Tensor | None:
    """The packed form of 1-D `values`; None where an element is infinite or no number, or the range too wide."""
    packed = torch.empty(rounded_bytes(values.numel(), bits), dtype=torch.uint8, device=values.device)
    lowest, steps, codes = _parts(packed, bits)
    for place, blocks in _stretches(values):
        lowest[place] = _lowest(blocks)
        steps[place] = _highest(blocks)
    largest = 2**bits - 1
    if is_relu:
        steps.div_(largest - 1)
    else:
        steps.sub_(lowest).div_(largest)
    # One look at the device for both answers: it waits for what has been computed so far.
    is_finite, has_negative = torch.stack([(lowest + steps).isfinite().all(), (lowest < 0).any()]).tolist()
    if is_relu and has_negative:
        return rounded(values, bits, noise)
    if not is_finite:
        return None
    steps.masked_fill_(steps < _SMALLEST_STEP, 0)
    if is_relu:
        just = _JUST_ABOVE_ZERO.get(values.dtype, 2.0**-20)
        torch.mul(steps, just - 1, out=lowest)
    inverse = steps.reciprocal().masked_fill_(steps == 0, 0)
    size = stretch_elements(values.numel(), values.device.type)
    scratch = torch.empty(2, size, dtype=torch.float32, device=values.device)
    whole = torch.empty(size, dtype=torch.uint8, device=values.device)
    for place, blocks in _stretches(values):
        room, chances = (row[: blocks.numel()].view_as(blocks) for row in scratch)
        # Of two dtypes, a CPU's operators make a copy in float32 first, which would be beside all of this.
        room.copy_(blocks)
        if not is_relu:
            room.sub_(lowest[place, None])
        room.mul_(inverse[place, None])
        noise.fill(chances.view(-1))
        room.add_(chances).clamp_(0, largest - is_relu)
        found = whole[: blocks.numel()].view_as(blocks)
        found.copy_(room)
        if is_relu:
            found.add_(blocks > 0)
        _pack(found, codes[place], bits)
    return packed


def packed_mask(values: torch.Tensor) -> torch.Tensor | None:
    """Of 1-D booleans, or floating numbers that are two values alone and nowhere else; None of any others."""
    if values.dtype == torch.bool:
        low, high = 0.0, 1.0
    else:
        bounds = [
            (float(_lowest(blocks).min()), float(_highest(blocks).max())) for _, blocks in _stretches(values)
        ]
        low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
        if (
            not isfinite(high - low)
            or low + (high - low) != high
            or not all(bool(((blocks == low) | (blocks == high)).all()) for _, blocks in _stretches(values))
        ):
            return None
    packed = torch.empty(rounded_bytes(values.numel(), MASK_BITS), dtype=torch.uint8, device=values.device)
    lowest, steps, codes = _parts(packed, MASK_BITS)
    lowest.fill_(low)
    steps.fill_(high - low)
    for place, blocks in _stretches(values):
        _pack((blocks != low).to(torch.uint8), codes[place], MASK_BITS)
    return packed


def restore(packed: torch.Tensor, values: torch.Tensor, bits: int, *, is_relu: bool = False) -> None:
    """Write what `packed` stands for into 1-D `values`."""
    lowest, steps, codes = _parts(packed, bits)
    count, device = values.numel(), values.device
    size = stretch_elements(count, device.type)
    casts = values.dtype != torch.float32
    scratch = torch.empty(size if casts else BLOCK_ELEMENTS, dtype=torch.float32, device=device)
    part = torch.empty(size * bits // 8 if bits < 8 else 0, dtype=torch.uint8, device=device)
    for start, end in _edges(count, size):
        place = slice(start // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS))
        is_whole = (end - start) % BLOCK_ELEMENTS == 0
        room = (
            values[start:end]
            if is_whole and not casts
            else scratch[: (place.stop - place.start) * BLOCK_ELEMENTS]
        )
        blocks = room.view(-1, BLOCK_ELEMENTS)
        _unpack(codes[place], blocks, bits, part)
        blocks.mul_(steps[place, None]).add_(lowest[place, None])
        if is_relu:
            blocks.clamp_(min=0)
        if casts or not is_whole:
            values[start:end].copy_(room[: end - start])


def _parts(packed: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_blocks = packed.numel() // (8 + BLOCK_ELEMENTS * bits // 8)
    ranges = packed[: 8 * num_blocks].view(torch.float32)
    codes = packed[8 * num_blocks :].view(num_blocks, BLOCK_ELEMENTS * bits // 8)
    return ranges[:num_blocks], ranges[num_blocks:], codes


def _edges(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Stretches of whole blocks, and what is left for the last one."""
    whole = count // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    for start in range(0, whole, size):
        yield start, min(whole, start + size)
    if whole < count:
        yield whole, count


def _stretches(values: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Which blocks, and their elements as a row each; the last block is filled up."""
    count = values.numel()
    for start, end in _edges(count, stretch_elements(count, values.device.type)):
        found = values[start:end]
        if (end - start) % BLOCK_ELEMENTS:
            found = values[-1:].repeat(BLOCK_ELEMENTS)
            found[: end - start] = values[start:end]
        yield slice(start // BLOCK_ELEMENTS, -(-end // BLOCK_ELEMENTS)), found.view(-1, BLOCK_ELEMENTS)


def _lowest(blocks: torch.Tensor) -> torch.Tensor:
    while blocks.shape[1] > _LEAST_BLOCK:
        half = blocks.shape[1] // 2
        blocks = torch.minimum(blocks[:, :half], blocks[:, half:])
    return blocks.amin(1)


def _highest(blocks: torch.Tensor) -> torch.Tensor:
    while blocks.shape[1] > _LEAST_BLOCK:
        half = blocks.shape[1] // 2
        blocks = torch.maximum(blocks[:, :half], blocks[:, half:])
    return blocks.amax(1)


def _pack(codes: torch.Tensor, packed: torch.Tensor, bits: int) -> None:
    """Rows of a block's codes into rows of its bytes."""
    per_byte, width = 8 // bits, packed.shape[1]
    if per_byte == 1:
        packed.copy_(codes)
        return
    torch.mul(codes[:, (per_byte - 1) * width :], 2**bits, out=packed)
    for part in range(per_byte - 2, -1, -1):
        packed.add_(codes[:, part * width : (part + 1) * width])
        if part:
            packed.mul_(2**bits)


def _unpack(packed: torch.Tensor, blocks: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    if bits == 8:
        blocks.copy_(packed)
        return
    width = packed.shape[1]
    room = scratch[: packed.numel()].view_as(packed)
    for part in range(8 // bits):
        torch.bitwise_right_shift(packed, part * bits, out=room).bitwise_and_(2**bits - 1)
        blocks[:, part * width : (part + 1) * width].copy_(room)
