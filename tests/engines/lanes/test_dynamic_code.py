"""Block-wise dynamic quantization: what comes back of what, and how far from it."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memadvisor.coded_states import TABLES_BYTES, coded_bytes, scratch_bytes
from memadvisor.engines.lanes.dynamic_code import DynamicCode, values_of
from tests.capture.true_peak import highest_bytes

CODE = DynamicCode(torch.device("cpu"))
TABLES = {is_signed: values_of(is_signed=is_signed) for is_signed in (False, True)}


def coded(values):
    packed = torch.empty(coded_bytes(values.numel()), dtype=torch.uint8)
    CODE.encode(values, packed)
    return packed


def back(values):
    decoded = torch.full_like(values, 7)
    CODE.decode(coded(values), decoded)
    return decoded


@pytest.mark.parametrize("is_signed", [False, True])
def test_every_code_stands_for_a_value_that_has_it(is_signed):
    table = torch.tensor(TABLES[is_signed])
    assert len(set(table.tolist())) == 256
    assert coded(table)[4:].tolist() == list(range(256))
    torch.testing.assert_close(
        back(table), table, rtol=2**-22, atol=0
    )  # the last bit of the scale is not its own
    if is_signed:
        torch.testing.assert_close(back(table * -(2.0**-60)), table * -(2.0**-60), rtol=2**-22, atol=0)


def test_tables_are_those_of_the_paper():
    """Seven decades, each with half as many values as the one above it; both signs alike but for 1 (section 2.2)."""
    for is_signed, most in ((False, 128), (True, 64)):
        decades = [math.ceil(-math.log10(value)) for value in TABLES[is_signed] if 0 < value < 1]
        assert [decades.count(decade) for decade in range(1, 8)] == [most >> decade for decade in range(7)]
    assert sorted(-value for value in TABLES[True] if value < 0) == [v for v in TABLES[True] if 0 < v < 1]


@given(
    st.integers(0, 2**31),
    st.sampled_from([1, 3, 256, 257, 1000]),
    st.floats(-30, 30),
    st.floats(0, 12),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
)
@example(468, 1, -30.0, 6.0, False, torch.float32)  # 6.7e-39
@settings(max_examples=40, deadline=None)
def test_what_comes_back_is_near(seed, count, size, spread, is_signed, dtype):
    """No further than half of the gap around it in its block's table; zeros, and blocks of denormal numbers, as zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator).abs() * 10**size
    values *= 10 ** (-spread * torch.rand(count, generator=generator))
    values[torch.rand(count, generator=generator) < 0.1] = 0
    values[torch.rand(count, generator=generator) < 0.1] = -0.0
    if is_signed:
        values *= torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    values = values.to(dtype)
    decoded = back(values)
    assert not decoded[values == 0].any()
    if dtype is torch.float32:
        assert torch.equal(back(decoded), decoded)
    for block, found in zip(values.double().split(256), decoded.double().split(256), strict=True):
        table = TABLES[bool((block < 0).any())]
        scale = max(block.max(), block.min(), key=abs)  # of two as large the one above 0
        if scale.abs() < torch.finfo(torch.float32).tiny:
            assert not found.any()
            continue
        block, found = (side if scale > 0 else -side for side in (block, found))
        scale = scale.abs()
        edges = torch.tensor(table, dtype=torch.double) * scale
        above = torch.searchsorted(edges, block).clamp(1, 255)
        half_gap = (edges[above] - edges[above - 1]) / 2
        beyond = (edges[0] - block).clamp(min=0)  # -1 is not in the table
        smallest = min(value for value in table if value > 0) * scale  # what is not 0 may be kept from it
        assert table[0] or ((found > 0) == (block > 0)).all()
        # a float32 rounds once to be looked up and once to be given back, and bfloat16 once more
        rounding = block.abs() * 2.0**-12 + found.abs() * (2.0**-8 if dtype is torch.bfloat16 else 2.0**-22)
        limit = torch.maximum(torch.maximum(half_gap, beyond), smallest * (block != 0)) + rounding
        assert ((found - block).abs() <= limit).all()


def test_stretches_of_a_long_tensor_are_coded_as_they_are_alone():
    values = torch.randn(2**16 + 512, generator=torch.Generator().manual_seed(1))
    parts = [back(values[: 2**16]), back(values[2**16 :])]
    assert torch.equal(back(values), torch.cat(parts))


@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=256), st.booleans())
@settings(max_examples=40, deadline=None)
def test_order_is_kept(values, is_signed):
    ascending = torch.tensor([-1.0] * is_signed + sorted(values) + [1.0])
    ascending[1:-1] -= 0.5 * is_signed
    assert all(a <= b for a, b in pairwise(back(ascending).tolist()))


def test_what_is_no_number_is_none_afterwards():
    values = torch.ones(768)
    values[5], values[300], values[512:] = torch.inf, torch.nan, 1e-39
    for decoded in (back(values), -back(-values)):
        assert decoded[:512].isnan().all()
        assert not decoded[512:].any()


def test_bytes_are_those_of_the_formula():
    assert sum(table.nbytes for table in CODE.tables) == TABLES_BYTES
    assert coded_bytes(512) == 512 + 2 * 4
    assert scratch_bytes(2**20, "cpu") == 9 * 2**16 + 22 * 256
    with pytest.raises(AssertionError, match="no codes of 8 elements"):
        CODE.encode(torch.ones(8), torch.empty(8, dtype=torch.uint8))


@pytest.mark.parametrize("num_elements", [200, 4096, 5000, 36864, 2**16 + 2**15, 2**17])
def test_coding_allocates_what_the_formula_says(num_elements):
    """Without what each block has, peaks in 8 bits were predicted 0.05 % too low."""
    values, packed = torch.rand(num_elements), torch.empty(coded_bytes(num_elements), dtype=torch.uint8)
    beyond_bytes = highest_bytes(lambda: CODE.encode(values, packed)) - scratch_bytes(num_elements, "cpu")
    assert 0 <= beyond_bytes <= 16  # numbers that Python hands to operators
