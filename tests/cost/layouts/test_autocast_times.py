"""What torch.autocast, fp32 and casts to 8 bits move more than 16 bits do, in bytes over the memory's bandwidth."""

from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.attention import attention_seconds
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.kernels import cast_seconds, device_of, row_casts_seconds
from memadvisor.cost.layouts.layer_work import weight_cast_bytes
from memadvisor.hardware.load import named_hardware
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_traits import Software

GPT = load_architecture("gpt3-1.3b")
SEQ, MICRO = 1024, 4
SCORES = MICRO * GPT.n_heads * SEQ**2
CARD = named_hardware("V100-32GB")
CODE = Software(compute_dtype="float16", fused_attention=False)


def moved(code):
    """Bytes of a score that pass forward and backward, beside the products."""
    step = TrainingStep(layout=Layout(micro_batch_size=MICRO), seq_len=SEQ, software=code)
    device = device_of(CARD, code.compute_dtype, FITTED)
    # Of a device whose memory is without end the products alone are left.
    alone = replace(device, memory_bandwidth_bytes_per_s=1e30)
    rate = device.memory_bandwidth_bytes_per_s * FITTED.bandwidth_share
    times = zip(attention_seconds(GPT, step, 0, device), attention_seconds(GPT, step, 0, alone), strict=True)
    return [round((whole - products) * rate / SCORES, 1) for whole, products in times]


def test_scores_are_cast_for_the_softmax_and_back():
    assert moved(replace(CODE, autocast=True)) == pytest.approx(
        [plain + cast for plain, cast in zip(moved(CODE), (16, 18), strict=True)], abs=0.2
    )
    dropout = replace(CODE, dropout=True)
    assert moved(replace(dropout, autocast=True)) == pytest.approx(
        [plain + cast for plain, cast in zip(moved(dropout), (20, 22), strict=True)], abs=0.2
    )


def test_weights_are_cast_for_each_microbatch_and_their_gradients_back():
    step = TrainingStep(layout=Layout(), seq_len=SEQ, software=replace(CODE, autocast=True))
    assert (weight_cast_bytes(step), weight_cast_bytes(replace(step, software=CODE))) == (6, 0)


def test_rows_with_a_scale_each_are_cast_for_each_product():
    """Along its rows an operand is read in 2 bytes and written in one, along its columns read twice; results of the two products
    of the backward are read and written once more."""
    card = named_hardware("H100-SXM-80GB")
    device = device_of(card, "float8_e4m3fn", FITTED)
    rate = device.memory_bandwidth_bytes_per_s * FITTED.bandwidth_share
    inputs, results, weights = 8e6, 4e6, 2e6

    forward, backward = (each * rate for each in row_casts_seconds(device, inputs, results, weights))
    assert forward == pytest.approx((2 + 1) * (inputs + weights))
    along_columns = (2 + 2 + 1) * (inputs + results + weights)
    assert backward == pytest.approx(along_columns + (2 + 1) * results + (2 + 2) * (inputs + weights))
    assert forward + backward > (cast_seconds(device, inputs) + cast_seconds(device, results)) * rate
    assert row_casts_seconds(device_of(card, "bfloat16", FITTED), inputs, results, weights) == (0.0, 0.0)
