"""Bytes of casts, counted by hand: an operand is read in two bytes and written in one, or in nine sixteenths."""

from dataclasses import replace

import pytest

from memadvisor.cost.layouts.casts import cast_seconds
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.hardware.load import named_hardware
from memadvisor.lora import Lora
from memadvisor.software import find_preset
from memadvisor.software_dtypes import with_precision

ROWS, COLUMNS, DEPTH = 4096.0, 512.0, 1024.0
INPUTS, RESULTS, WEIGHTS = ROWS * DEPTH, ROWS * COLUMNS, COLUMNS * DEPTH


def cast_bytes(software):
    device = device_of(named_hardware("B200"), software.compute_dtype, FITTED)
    rate = device.memory_bandwidth_bytes_per_s * FITTED.bandwidth_share
    return [each * rate for each in cast_seconds(device, [(ROWS, COLUMNS, DEPTH, 1.0)], software)]


def code_of(preset, precision):
    return with_precision(find_preset(preset).software, precision)


def test_products_of_8_bits_may_reach_another_share_than_those_of_16():
    """Of an MI300X and MI325X: of their best products (668 and 785 TFLOP/s in 16 bits, 1273 and 1519 in 8) what an H100's steps
    reach of its best, 0.6 of the sheet's rate of 0.803 and 0.709."""
    for name, best, best_narrow in (("MI300X", 668.4, 1273), ("MI325X", 784.9, 1519)):
        narrow = device_of(named_hardware(name), "float8_e4m3fnuz", FITTED)
        assert narrow.matmul_share == pytest.approx(0.6 / 0.709 * best_narrow / 2614.9)
        assert narrow.wide.matmul_share == pytest.approx(0.6 / 0.803 * best / 1307.4)


def test_sixteen_bits_are_not_cast():
    assert cast_bytes(code_of("nemo", "bf16")) == [0.0, 0.0]


@pytest.mark.parametrize(
    "precision, an_element",
    [("fp8", 2 + 2), ("fp8-mx", 2 + 2), ("fp8-cs", 2 + 2 + 2), ("nvfp4", 2 + 2 + 2 * 0.5625)],
)
def test_transformer_engine_casts_both_ways_at_once(precision, an_element):
    """Current scaling, and NVFP4 with its scale of a tensor, look for the largest element first."""
    forward, backward = cast_bytes(code_of("nemo", precision))
    assert forward == pytest.approx(an_element * INPUTS)
    assert backward == pytest.approx(an_element * RESULTS)


def test_torchao_casts_inputs_again_in_the_backward():
    """Both times one way; gradients of results are looked at and cast both ways. Matrices were cast before they were gathered."""
    forward, backward = cast_bytes(code_of("torchtitan", "float8"))
    assert forward == pytest.approx((2 + 2 + 1) * INPUTS)
    assert backward == pytest.approx((2 + 1) * INPUTS + (2 + 2 + 2) * RESULTS)


def test_blocks_of_a_matrix_are_cast_where_it_is_gathered_in_sixteen_bits():
    """A scale for each 32 elements along a product's depth: each operand of each product by itself."""
    forward, backward = cast_bytes(code_of("torchtitan", "mxfp8"))
    assert forward == pytest.approx((2 + 1) * (INPUTS + WEIGHTS))
    assert backward == pytest.approx((2 + 1) * (INPUTS + WEIGHTS) + 2 * (2 + 1) * RESULTS)


def test_rows_with_a_scale_each_are_cast_for_each_product():
    """Along its columns an operand is read twice; results of the two products of the backward are read and written once more."""
    forward, backward = cast_bytes(code_of("torchtitan", "float8 rowwise"))
    assert forward == pytest.approx((2 + 1) * (INPUTS + WEIGHTS))
    along_columns = (2 + 2 + 1) * (INPUTS + RESULTS + WEIGHTS)
    assert backward == pytest.approx(along_columns + (2 + 1) * RESULTS + (2 + 2) * (INPUTS + WEIGHTS))


def test_what_meets_frozen_matrices_is_not_transposed():
    software = replace(code_of("nemo", "fp8"), lora=Lora(rank=8))
    assert cast_bytes(software) == pytest.approx([(2 + 1) * INPUTS, (2 + 1) * RESULTS])


def test_four_bits_are_gathered_in_sixteen_and_kept_beside_them():
    """Megatron Bridge gathers parameters in 8 bits, and never in 4."""
    narrow, fp8 = code_of("nemo", "nvfp4"), code_of("nemo", "fp8")
    assert fp8.gathers_narrow and not narrow.gathers_narrow
    assert (fp8.narrow_copy_bytes, narrow.narrow_copy_bytes) == (0.0, 2 * 0.5625)
