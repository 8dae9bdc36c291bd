"""What torch.autocast and fp32 move more than 16 bits do, in bytes over the memory's bandwidth."""

from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.attention import attention_seconds
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.kernels import device_of
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
