"""Laws of activations in a few bits: how far off, what on average, what stays, and that bytes are as told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.activation_bits import BITS, restoring_scratch_bytes, rounded_bytes, rounding_scratch_bytes
from memadvisor.compression import BLOCK_ELEMENTS
from memadvisor.engines.activations.rounded import Noise, packed_mask, restore, rounded
from memadvisor.engines.activations.rounding_cost import measure_rounding
from tests.capture.true_peak import highest_bytes

LENGTHS = st.integers(1, 3 * BLOCK_ELEMENTS + 1) | st.sampled_from([2**15 - 256, 2**16 + 3])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
CPU = torch.device("cpu")


def there_and_back(values, bits, seed=0, **options):
    packed = rounded(values, bits, Noise(CPU, seed), **options)
    assert packed.nbytes == rounded_bytes(values.numel(), bits)
    back = torch.empty_like(values)
    restore(packed, back, bits, **options)
    return back


def of_block(values, reduce):
    """For each element, of its block."""
    found = [reduce(block) for block in values.double().split(BLOCK_ELEMENTS)]
    return torch.stack(found).repeat_interleave(BLOCK_ELEMENTS)[: values.numel()]


@given(LENGTHS, st.sampled_from(BITS), DTYPES, st.integers(0, 2**31), st.integers(-3, 3))
@settings(max_examples=12, deadline=None)
def test_nothing_is_a_step_off_or_outside_of_its_blocks_range(count, bits, dtype, seed, exponent):
    random = torch.Generator().manual_seed(seed)
    values = (torch.randn(count, generator=random) * 10.0**exponent).to(dtype)
    back = there_and_back(values, bits, seed)

    lowest, highest = of_block(values, torch.min), of_block(values, torch.max)
    step = (highest - lowest) / (2**bits - 1)
    slack = 4 * max(torch.finfo(dtype).eps, 2.0**-23) * values.double().abs().max() + 1e-5 * step
    assert bool(((values.double() - back.double()).abs() <= step + slack).all())
    assert bool((back.double() >= lowest - slack).all()) and bool((back.double() <= highest + slack).all())
    smallest = values == lowest.to(dtype)
    assert torch.equal(back[smallest], values[smallest]) or dtype is torch.float64


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("is_relu", [False, True])
def test_on_average_an_element_is_what_it_was(bits, is_relu):
    """The mean of n roundings is within five of its standard deviations, of which one rounding has half a step at most."""
    values = torch.linspace(-1, 2, 3 * BLOCK_ELEMENTS)
    values = values.relu() if is_relu else values
    num_trials = 200
    noise, total, back = Noise(CPU, 3), torch.zeros_like(values), torch.empty_like(values)
    for _ in range(num_trials):
        restore(rounded(values, bits, noise, is_relu=is_relu), back, bits, is_relu=is_relu)
        total += back
    step = (of_block(values, torch.max) - of_block(values, torch.min)) / (2**bits - 1)
    if is_relu:
        step = of_block(values, torch.max) / (2**bits - 2)
    allowed = 5 * 0.5 * step / num_trials**0.5 + 1e-5
    assert bool(((total / num_trials - values).abs() <= allowed).all())


@given(LENGTHS, st.sampled_from(BITS), DTYPES, st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_a_relu_result_is_positive_where_it_was(count, bits, dtype, seed):
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype).relu()
    back = there_and_back(values, bits, seed, is_relu=True)
    assert torch.equal(back > 0, values > 0)


@given(LENGTHS, st.sampled_from(BITS), st.integers(-5, 5), st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_whole_numbers_that_the_codes_reach_come_back_exactly(count, bits, lowest, seed):
    """Every code at every place of a byte, also in the block that is filled up."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**bits, (count,), generator=random).float() + lowest
    values[::BLOCK_ELEMENTS] = lowest
    values[1::BLOCK_ELEMENTS] = lowest + 2**bits - 1
    last = values[-(count % BLOCK_ELEMENTS) :]
    back = there_and_back(values, bits, seed)
    whole = values if len(last) > 1 else values[:-1]
    assert torch.equal(back[: len(whole)], whole)


@given(LENGTHS, st.floats(-3, 3, width=32), st.integers(0, 2**31))
@settings(max_examples=12, deadline=None)
def test_masks_come_back_as_they_were_and_nothing_else_is_one(count, high, seed):
    mask = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.3
    for values in (mask, mask * torch.tensor(high)):
        packed = packed_mask(values)
        assert packed.nbytes == rounded_bytes(count, 1)
        back = torch.empty_like(values)
        restore(packed, back, 1)
        assert torch.equal(back, values)
    if count > 2:
        values = mask.float()
        values[:3] = torch.tensor([0.0, 1.0, 0.5])
        assert packed_mask(values) is None


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_has_no_range_has_no_codes(bits, value):
    values = torch.ones(1000)
    values[700] = value
    assert rounded(values, bits, Noise(CPU, 0)) is None
    assert rounded(values, bits, Noise(CPU, 0), is_relu=True) is None
    assert packed_mask(torch.tensor([value, 1.0])) is None
    assert rounded(torch.tensor([-3e38, 3e38]), bits, Noise(CPU, 0)) is None


def test_of_one_seed_all_is_the_same_and_the_scripts_numbers_are_its_own():
    values = torch.randn(5000)
    before = torch.get_rng_state()
    first, again, other = (there_and_back(values, 4, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_chances_are_even_and_below_one_also_beside_the_largest_code():
    chances = torch.empty(2**18 + 1)
    Noise(CPU, 5).fill(chances)
    assert float(chances.min()) >= 0 and float((chances + 254).max()) < 255
    counts = torch.histc(chances, bins=16, min=0, max=1)
    assert bool((counts / len(chances) - 1 / 16).abs().max() < 5 * (1 / 16 / len(chances)) ** 0.5)


def test_what_rounding_costs_is_measured_without_a_trace_in_the_training():
    before = torch.get_rng_state()
    measured = [measure_rounding() for _ in range(3)]  # one may come out as 0 on a busy machine
    assert all(0 <= seconds < 1 for costs_s in measured for seconds in costs_s)
    assert max(costs_s[1] for costs_s in measured) > 0 and max(costs_s[3] for costs_s in measured) > 0
    assert torch.equal(torch.get_rng_state(), before) and torch.is_grad_enabled()


@pytest.mark.parametrize("is_relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("count", "bits"), [(2**15, 8), (2**16 + 3, 8), (2**16 + 3, 4), (2**16 + 3, 2)])
def test_rounding_allocates_what_the_formula_says(count, bits, dtype, is_relu):
    """Without what each block has, peaks were predicted up to 0.03 % too low; in bfloat16 a CPU's operators on two dtypes
    made a copy of each stretch in float32, and they were up to 2.4 % too low."""
    values, noise = torch.randn(count).to(dtype), Noise(CPU, 0)
    values = values.relu() if is_relu else values
    told_bytes = rounded_bytes(count, bits) + rounding_scratch_bytes(count, "cpu")
    found_bytes = highest_bytes(lambda: rounded(values, bits, noise, is_relu=is_relu))
    # Some of what is told is there under a dispatch mode alone, as a traced step has one.
    assert told_bytes - 20 <= found_bytes <= told_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "bits"), [(2**16 + 256, 8), (2**16 + 3, 4), (2**16 + 3, 2)])
def test_bringing_back_allocates_what_the_formula_says(count, bits, dtype):
    values = torch.randn(count).to(dtype)
    packed = rounded(values, bits, Noise(CPU, 0))
    told_bytes = restoring_scratch_bytes(count, bits, str(dtype).removeprefix("torch."), "cpu")
    assert 0 <= told_bytes - highest_bytes(lambda: restore(packed, values, bits)) <= 4 * BLOCK_ELEMENTS
