"""Laws of rounding to a few bits: how far off, what stays, what becomes of infinities, and that bytes are as told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.compression import BLOCK_ELEMENTS, packed_bytes, scratch_elements, sparse_bytes
from memadvisor.engines.collectives.quantise import dequantise, quantise
from memadvisor.engines.collectives.sparse import densify, sparsify

LENGTHS = st.integers(1, 3 * BLOCK_ELEMENTS + 1) | st.sampled_from([2**16 + 1, 2**18 + 3])
BITS = st.sampled_from([8, 4])
CODES = {8: 127, 4: 7}
FLOAT32_SLACK = 2e-5  # of a scale: the product of a code and its scale is rounded too


def there_and_back(values: torch.Tensor, bits: int, *, in_place: bool = False) -> torch.Tensor:
    count = values.numel()
    packed = torch.empty(packed_bytes(count, bits), dtype=torch.uint8)
    scratch = torch.empty(scratch_elements(count))
    used = values.clone()
    quantise(used, packed, bits, used if in_place else scratch)
    assert in_place or torch.equal(used.nan_to_num(), values.nan_to_num())
    back = torch.empty_like(values)
    dequantise(packed, back, bits, None if values.dtype == torch.float32 else scratch)
    return back


def scales_of(values: torch.Tensor, bits: int) -> torch.Tensor:
    """The scale of each element's block."""
    blocks = [block.abs().max() / CODES[bits] for block in values.double().split(BLOCK_ELEMENTS)]
    return torch.stack(blocks).repeat_interleave(BLOCK_ELEMENTS)[: values.numel()]


@given(LENGTHS, BITS, st.integers(0, 2**31), st.integers(-30, 30), st.booleans())
@settings(max_examples=40, deadline=None)
def test_nothing_is_further_off_than_half_a_scale_of_its_block(count, bits, seed, exponent, in_place):
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=random) * 10.0**exponent
    values[torch.rand(count, generator=random) < 0.2] = 0
    back = there_and_back(values, bits, in_place=in_place)

    allowed = scales_of(values, bits) * (0.5 + FLOAT32_SLACK)
    assert bool(((values.double() - back.double()).abs() <= allowed).all())
    assert bool((back[values == 0] == 0).all())


@given(LENGTHS, BITS, st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_whole_multiples_of_a_scale_come_back_exactly(count, bits, seed):
    """Every code, also in the odd half of the last byte."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(-CODES[bits], CODES[bits] + 1, (count,), generator=random).float()
    values[::BLOCK_ELEMENTS] = CODES[bits]

    assert torch.equal(there_and_back(values * 0.25, bits), values * 0.25)


@given(BITS, st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 2 * BLOCK_ELEMENTS + 2))
@settings(max_examples=20, deadline=None)
def test_an_infinity_makes_its_block_nan_and_no_other(bits, strange, place):
    values = torch.linspace(-1, 1, 2 * BLOCK_ELEMENTS + 3)
    values[place] = strange
    back = there_and_back(values, bits)
    block = torch.arange(values.numel()) // BLOCK_ELEMENTS

    assert torch.equal(back.isnan(), block == place // BLOCK_ELEMENTS)


@pytest.mark.parametrize("bits", [8, 4])
def test_magnitudes_without_a_normal_scale_are_zeros(bits):
    values = torch.tensor([1e-38, -1e-40, 1e-45])
    assert there_and_back(values, bits).tolist() == [0, 0, 0]


def test_other_dtypes_are_rounded_once_more_on_the_way_back():
    values = torch.linspace(-3, 5, 70_001).bfloat16()
    back = there_and_back(values, 8)
    exact = there_and_back(values.float(), 8)

    assert back.dtype == torch.bfloat16 and torch.equal(back, exact.bfloat16())


@given(st.integers(1, 2**22), BITS)
def test_a_message_takes_its_bits_and_a_scale_a_block(count, bits):
    size_bytes = packed_bytes(count, bits)
    exact = count * bits / 8 + 4 * math.ceil(count / BLOCK_ELEMENTS)

    assert size_bytes % 4 == 0 and 0 <= size_bytes - exact < 5
    assert scratch_elements(count) <= max(2**16, count / 16 + BLOCK_ELEMENTS)


@given(LENGTHS, st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_one_bit_keeps_each_sign_and_each_blocks_mean_magnitude(count, seed):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    back = there_and_back(values, 1)

    assert torch.equal(back >= 0, values >= 0)
    for block, found in zip(values.split(BLOCK_ELEMENTS), back.split(BLOCK_ELEMENTS), strict=True):
        assert torch.allclose(found.abs(), block.abs().mean().expand_as(block), rtol=1e-5)
    assert there_and_back(torch.zeros(count), 1).abs().max() == 0


@given(st.integers(1, 3 * BLOCK_ELEMENTS + 1) | st.just(2**16 + 1), st.integers(1, 64), st.integers(0, 2**31))
@settings(max_examples=15, deadline=None)
def test_the_largest_of_each_block_come_back_exactly_and_nothing_else(count, top, seed):
    """By hand, block by block; magnitudes differ, so there is one answer."""
    random = torch.Generator().manual_seed(seed)
    values = (torch.randperm(count, generator=random) + 1.0) * (1 - 2 * (torch.arange(count) % 2))
    message = torch.empty(sparse_bytes(count, top), dtype=torch.uint8)
    sparsify(values, message, top, torch.empty(scratch_elements(count)))
    back, sums = torch.full_like(values, 7.0), torch.ones_like(values)
    densify(message, back, top)
    densify(message, sums, top, add=True)

    expected = torch.zeros_like(values)
    for start in range(0, count, BLOCK_ELEMENTS):
        block = values[start : start + BLOCK_ELEMENTS].tolist()
        for place in sorted(range(len(block)), key=lambda i: -abs(block[i]))[:top]:
            expected[start + place] = block[place]
    assert torch.equal(back, expected) and torch.equal(sums, expected + 1)


def test_adding_to_numbers_is_reading_and_adding():
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(1))
    scratch = torch.empty(scratch_elements(values.numel()))
    for bits in (8, 4, 1):
        packed = torch.empty(packed_bytes(values.numel(), bits), dtype=torch.uint8)
        quantise(values, packed, bits, scratch)
        total = torch.ones_like(values)
        dequantise(packed, total, bits, scratch, add=True)
        assert torch.equal(total, there_and_back(values, bits) + 1)
