"""Laws of rounding to a few bits: how far off, what stays, what becomes of infinities, and that bytes are as told."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.compression import BLOCK_ELEMENTS, packed_bytes, scratch_elements
from memadvisor.engines.quantise import dequantise, quantise

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
@settings(max_examples=60, deadline=None)
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
