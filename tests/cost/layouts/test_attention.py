"""Fused attention's rate by length, card and kernel."""

from dataclasses import replace

import pytest

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.attention import attention_seconds
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_traits import Software

LLAMA = Architecture(
    name="llama", n_layers=1, hidden=4096, n_heads=32, n_kv_heads=32, head_dim=128, ffn=11008, vocab=32000,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip


def a_pair(seq_len, gpu="1xA100", model=LLAMA, **traits):
    """Seconds of a pair of tokens, forward and backward."""
    step = TrainingStep(layout=Layout(), seq_len=seq_len, software=Software(**traits))
    device = device_of(parse_cluster(gpu).accelerator, "bfloat16", FITTED)
    pairs = seq_len**2 * (0.5 if model.causal else 1.0)
    return [seconds / pairs for seconds in attention_seconds(model, step, 0, device)]


def test_flash_attention_2_is_faster_on_long_sequences_before_hopper():
    """100 keys beside 256 and 4,096 forward, and 280 backward."""
    short, long = a_pair(512), a_pair(8192)
    assert short[0] / long[0] == pytest.approx((1 + 100 / 256) / (1 + 100 / 4096))
    assert short[1] / long[1] == pytest.approx((1 + 280 / 256) / (1 + 280 / 4096))


def test_its_backward_is_as_measured_beside_a_short_sequence():
    """52.88 TFLOP/s at 512 tokens and 77.42 at 8,192 without a mask: https://github.com/gpu-mode/ring-attention/issues/10."""
    short, long = (a_pair(length, model=replace(LLAMA, causal=False))[1] for length in (512, 8192))
    assert short / long == pytest.approx(77.42 / 52.88, rel=0.03)


def test_steps_of_usual_length_are_as_the_coefficients_have_them():
    for length in (2048, 4096):
        one, other = a_pair(length), a_pair(length, flash2=False)
        assert sum(one) == pytest.approx(sum(other), rel=0.06)


@pytest.mark.parametrize(("gpu", "traits"), [("1xH100", {}), ("1xA100", {"flash2": False})])
def test_other_cards_and_kernels_have_one_rate(gpu, traits):
    assert a_pair(512, gpu, **traits) == pytest.approx(a_pair(65536, gpu, **traits))


def seconds_of(layer, seq_len, gpu="1xH100", model=LLAMA, **traits):
    step = TrainingStep(layout=Layout(), seq_len=seq_len, software=Software(**traits))
    return attention_seconds(
        model, step, layer, device_of(parse_cluster(gpu).accelerator, "bfloat16", FITTED)
    )


WINDOWED = replace(LLAMA, n_layers=4, window=1024, full_every=2)


def test_a_window_costs_what_its_keys_and_a_tile_do():
    """Of 8,192 tokens one sees 1,024 (the first fewer: 960 on average) and 128 of its tile, where half of all were 4,096."""
    windowed, whole = (seconds_of(layer, 8192, model=WINDOWED) for layer in (0, 1))

    for part, full in zip(windowed, whole, strict=True):
        assert part / full == pytest.approx((1024 * (1 - 1024 / 16384) + 128) / 4096)
    assert whole == pytest.approx(seconds_of(0, 8192))


def test_a_window_as_long_as_the_sequence_is_none():
    assert seconds_of(0, 1024, model=WINDOWED) == pytest.approx(seconds_of(1, 1024, model=WINDOWED))


def test_windows_of_a_mask_cost_all_the_same():
    masked = seconds_of(0, 8192, model=WINDOWED, masks_windows=True)
    assert masked == pytest.approx(seconds_of(1, 8192, model=WINDOWED))


def test_kernels_of_ampere_s_instructions_are_no_faster_on_blackwell_than_on_hopper():
    """prime-rl's steps of 65,536 tokens with FlashAttention 2 take as long on B200 as on H200 (benchmarks/unseen/prime_rl.csv)."""
    hopper, blackwell = (a_pair(65_536, gpu, attention_as_on_hopper=True) for gpu in ("1xH100", "1xB200"))
    assert blackwell == pytest.approx(hopper, rel=1e-3)
    assert hopper == pytest.approx(a_pair(65_536, "1xH100"), rel=1e-3)
    assert a_pair(65_536, "1xB200")[0] < 0.5 * blackwell[0]
    older = (a_pair(65_536, "1xA100", attention_as_on_hopper=is_so) for is_so in (False, True))
    assert next(older) == next(older)
