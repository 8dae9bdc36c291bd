"""What recurrences keep and take, held against counts by hand and against laws of what their length does not change."""

from dataclasses import replace

import pytest
import torch

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.flops import forward_flops
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.recurrences import (
    recurrence_exchange_bytes,
    recurrence_saved_bytes,
    recurrence_seconds,
)
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.errors import UsageError
from memadvisor.hardware.load import load_hardware
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import Lora
from memadvisor.recurrence import Recurrence
from memadvisor.software_traits import Software
from tests.cost.layouts.nodes import make_cluster

# Qwen3-Next's.
DELTA = Recurrence(kind="gated_delta_net", n_heads=32, head_dim=128, n_key_heads=16, state_dim=128, norm=128)
# Nemotron-H 8B's.
MAMBA2 = Recurrence(
    kind="mamba2", n_heads=128, head_dim=64, n_key_heads=8, state_dim=128, convolution_bias=True, norm=8192
)
# Kimi Linear 48B's, and MiniMax-Text-01's of half as many heads.
KIMI = Recurrence(
    kind="kimi_delta", n_heads=32, head_dim=128, n_key_heads=32, state_dim=128, norm=128, step_rank=128
)
LIGHTNING = Recurrence(
    kind="lightning", n_heads=32, head_dim=128, n_key_heads=32, state_dim=128, convolution=0, norm=4096
)
MAMBA = Recurrence(kind="mamba", n_heads=8192, head_dim=1, state_dim=16, step_rank=256, norm=288)


def make_model(mixer, pattern="R", **changes):
    return Architecture(
        name="x", n_layers=4, hidden=2048, n_heads=16, n_kv_heads=2, head_dim=128, ffn=5632, vocab=32000,
        tied_embeddings=False, gated_mlp=True, layer_pattern=pattern, recurrence=mixer, **changes,
    )  # fmt: skip


def make_step(seq_len=4096, software=None, **layout):
    return TrainingStep(layout=Layout(**layout), seq_len=seq_len, software=software or Software())


def test_a_delta_net_keeps_what_its_kernels_save():
    """Of a token, two bytes of: queries, keys and values before the convolution (8192), queries and keys of 32 heads,
    values, the result, the gate, and the last product's input (4096 each); of each head a row of 64 of the chunk's
    inverse. The rest is small."""
    kept = recurrence_saved_bytes(make_model(DELTA), make_step(seq_len=1), 0, 1.0)
    large = 2 * (8192 + 2 * 4096 + 4 * 4096 + 32 * 64)

    assert large < kept == large + 32 * 28


def test_mamba2_keeps_what_comes_in_and_its_result():
    """zxbcdt and out_x of mamba_split_conv1d_scan_combined; the last product's input where it is not inside, as in transformers."""
    megatron, inside = (
        recurrence_saved_bytes(
            make_model(MAMBA2), make_step(seq_len=1, software=Software(reference_code=on)), 0, 1.0
        )
        for on in (False, True)
    )
    columns = 2 * 8192 + 2 * 1024 + 128
    assert inside == 2 * (columns + 8192) + 4 * 8
    assert megatron == inside + 2 * 8192


@pytest.mark.parametrize("mixer", [DELTA, KIMI, LIGHTNING, MAMBA2, MAMBA])
def test_time_and_memory_grow_with_the_length_and_no_faster(mixer):
    model, machine = make_model(mixer), device_of(load_hardware("H100-SXM-80GB"), "bfloat16", FITTED)
    short, long = (make_step(seq_len=length) for length in (4096, 65536))

    for one in (
        lambda step: sum(recurrence_seconds(model, step, 0, machine)),
        lambda step: layer_saved_bytes(model, step, 0),
        lambda step: forward_flops(model, step),
    ):
        assert one(long) == pytest.approx(16 * one(short), rel=1e-9)


@pytest.mark.parametrize("mixer", [DELTA, KIMI, LIGHTNING, MAMBA2, MAMBA])
def test_tensor_parallel_ranks_part_the_heads(mixer):
    model, machine = make_model(mixer), device_of(load_hardware("H100-SXM-80GB"), "bfloat16", FITTED)
    whole, half = (make_step(data=2 // tensor, tensor=tensor) for tensor in (1, 2))

    assert (
        recurrence_saved_bytes(model, half, 0, 4096.0) == recurrence_saved_bytes(model, whole, 0, 4096.0) / 2
    )
    assert (
        recurrence_seconds(model, half, 0, machine)[0] == recurrence_seconds(model, whole, 0, machine)[0] / 2
    )


def test_flops_of_a_delta_net_are_those_that_megatron_bridge_counts():
    """2 (h (2 qk + 2 v + 2 heads) + kernel (2 qk + v) + heads v^2 4 + h v) a token; two norms' weights and the head's besides."""
    model = replace(make_model(DELTA), n_layers=1)
    counted = 2 * (2048 * (2 * 2048 + 2 * 4096 + 64) + 4 * 8192 + 32 * 128**2 * 4 + 2048 * 4096)
    other = 2 * (2048 * 32000 + 2 * 2048 + 2 * 32 + 128)

    assert forward_flops(model, make_step(seq_len=1)) == counted + other


def test_a_step_of_mixed_layers_has_its_recurrences_beside_its_attention():
    model = make_model(DELTA, "rrra")
    found = estimate_step(model, make_step(num_microbatches=2), make_cluster(ranks=1))

    assert sum(found.time_s.values()) == pytest.approx(found.step_time_s, rel=1e-9)
    assert found.time_s["recurrence"] > 0 < found.time_s["attention"]
    assert 0 < found.mfu < found.hfu + 1e-12 < 1


def test_context_parallel_ranks_exchange_what_comes_in_and_their_results():
    """Of a token 12352 and 4096 columns in two bytes, where attention would send keys and values round its ring."""
    model, step = make_model(DELTA), make_step(seq_len=32768, context=8)
    assert recurrence_exchange_bytes(model, 4096.0, tensor=2) == 4096 * (12352 + 4096)

    ring, exchange = (
        estimate_step(each, step, make_cluster(ranks=8)).time_s["tensor_context_expert_collectives"]
        for each in (replace(model, layer_pattern="F"), model)
    )
    assert ring == 0 < exchange


def test_adapters_beside_all_matrices_are_beside_a_recurrences_too():
    model, plain = make_model(DELTA), Software(parameter_bytes=4)
    some, every = (
        estimate_step(
            model, make_step(software=replace(plain, lora=lora)), make_cluster(ranks=1)
        ).worst.optimizer_bytes
        for lora in (Lora(rank=8, targets=("query",)), Lora(rank=8))
    )
    assert some == 0
    assert every == 12 * 4 * 8 * ((2048 + DELTA.in_columns) + (4096 + 2048))


def test_a_grid_of_tensor_parallel_ranks_is_refused():
    with pytest.raises(UsageError, match="does not part on a 2d grid"):
        estimate_step(make_model(MAMBA2), make_step(tensor=4, tensor_kind="2d"), make_cluster(ranks=4))


SHORT = Recurrence(kind="short_convolution", n_heads=2048, head_dim=1, state_dim=1, convolution=3)


def test_a_short_convolution_keeps_what_autograd_does():
    """Two gates and a convolution of three tokens, as transformers has LFM2's: what comes in (three columns), the convolution's
    input and its result, and the last product's input; torch's convolution keeps the two tokens behind the end besides."""
    batch, length, width = 2, 32, 64
    weights = torch.randn(width, 1, 3).bfloat16(), torch.randn(width, width).bfloat16().requires_grad_()
    come_in = torch.randn(batch, length, 3 * width).bfloat16().requires_grad_().mul(1.0)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        before, behind, values = come_in.transpose(-1, -2).chunk(3, dim=-2)
        mixed = torch.nn.functional.conv1d(before * values, weights[0], padding=2, groups=width)
        result = behind * mixed[..., :length]
        torch.nn.functional.linear(result.transpose(-1, -2).contiguous(), weights[1])
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    mixer = replace(SHORT, n_heads=width)
    counted = recurrence_saved_bytes(
        replace(make_model(mixer), hidden=width), make_step(), 0, float(batch * length)
    )
    assert sum(kept.values()) == counted + 2 * batch * 2 * width


def test_a_short_convolution_takes_what_its_operators_move():
    """Forward 6 bytes of a column for each gate, 4 for the convolution and 4 for a copy; backward 10, 6 and 4."""
    device = device_of(make_cluster(1).accelerator, "bfloat16", FITTED)
    forward_s, backward_s = recurrence_seconds(make_model(SHORT), make_step(), 0, device)
    assert backward_s / forward_s == pytest.approx(30 / 20)
    assert recurrence_exchange_bytes(make_model(SHORT), 4096.0, 2) == 0


class Kernel(torch.autograd.Function):
    """Stands for a kernel: keeps what it is told to, and gives one of it back."""

    @staticmethod
    def forward(ctx, result, *kept):
        ctx.save_for_backward(*kept)
        return result.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError


def kept_bytes(work, *weights):
    """By autograd, each storage once, without weights."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def test_lightning_attention_keeps_what_autograd_does():
    """MiniMax's class around its authors' kernel, which saves queries, keys and values; the norm, in one kernel, its input."""
    tokens, heads, width = 32, 2, 16
    inner = heads * width
    come_in = torch.randn(tokens, 4 * inner).bfloat16().requires_grad_().mul(1.0)
    mixed, gate = come_in[:, : 3 * inner].clone(), come_in[:, 3 * inner :].clone()
    out = torch.randn(48, inner).bfloat16().requires_grad_()

    def work():
        query, key, value = torch.nn.functional.silu(mixed).split(inner, dim=-1)
        parts = [part.clone() for part in (query, key, value)]
        scanned = Kernel.apply(parts[2], *parts)
        normed = Kernel.apply(scanned, scanned)
        return torch.nn.functional.linear(torch.sigmoid(gate) * normed, out)

    mixer = replace(LIGHTNING, n_heads=heads, n_key_heads=heads, head_dim=width, state_dim=width)
    model = replace(make_model(mixer), hidden=48)
    assert kept_bytes(work, out) == recurrence_saved_bytes(model, make_step(), 0, float(tokens))


def test_kimi_delta_attention_keeps_what_autograd_does():
    """Its kernels save what flash-linear-attention's do; the gated norm its input, the gate, and a number of each head."""
    tokens, heads, width = 64, 2, 16
    inner, half = heads * width, {"dtype": torch.bfloat16}
    mixed, decay, gate = (
        torch.randn(tokens, n, **half).requires_grad_().mul(1.0) for n in (3 * inner, width, width)
    )
    steps = torch.randn(tokens, heads, **half).requires_grad_().mul(1.0)
    decays, gates, out = (
        torch.randn(n, m, **half).requires_grad_() for n, m in ((inner, width), (inner, width), (48, inner))
    )
    number = [
        torch.zeros(tokens, heads) for _ in range(4)
    ]  # of queries' and keys' norms, steps in 4 bytes, the norm
    rows = [torch.zeros(tokens, heads, 64, **half) for _ in range(2)]

    def work():
        query, key, value = (part.clone() for part in Kernel.apply(mixed, mixed).split(inner, dim=-1))
        columns = torch.nn.functional.linear(decay, decays)
        scanned = Kernel.apply(value, query, key, value, columns, steps, *number[:3], *rows)
        normed = Kernel.apply(scanned, scanned, torch.nn.functional.linear(gate, gates), number[3])
        return torch.nn.functional.linear(normed, out)

    mixer = replace(KIMI, n_heads=heads, n_key_heads=heads, head_dim=width, state_dim=width, step_rank=width)
    model = replace(make_model(mixer), hidden=48)
    assert kept_bytes(work, decays, gates, out) == recurrence_saved_bytes(
        model, make_step(), 0, float(tokens)
    )


def test_flops_of_linear_attention_are_counted_by_hand():
    """Of a token: two for each parameter of a product, and 8 or 5 of each number of the states."""
    step = make_step(seq_len=1)
    head = 2 * 2048 * 32000
    kimi = 2 * (2048 * (3 * 4096 + 256 + 32) + 2 * 128 * 4096 + 4096 * 2048 + 4 * 12288) + 8 * 4096 * 128
    lightning = 2 * (2048 * 16384 + 4096 * 2048) + 5 * 4096 * 128
    small = {KIMI: 2 * (2 * 2048 + 4096 + 32 + 128), LIGHTNING: 2 * (2 * 2048 + 4096)}

    for mixer, expected in ((KIMI, kimi), (LIGHTNING, lightning)):
        model = replace(make_model(mixer), n_layers=1)
        assert forward_flops(model, step) == expected + head + small[mixer]
