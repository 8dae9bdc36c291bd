"""What a Llama's block written as torchtitan's keeps, plain and recomputed operator by operator, held against torch itself: its
autograd, and its own checkpoint with torchtitan's rule."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from memadvisor.architecture import Architecture, Experts
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import layer_groups, layer_work
from memadvisor.cost.layouts.links import group_of
from memadvisor.cost.layouts.operators import operators_saved_bytes, repeated_flops, unneeded_products
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_torch import FSDP

B, S, H, HEADS, KV, FFN = 2, 32, 64, 4, 2, 160
LLAMA = Architecture(
    name="llama", n_layers=2, hidden=H, n_heads=HEADS, n_kv_heads=KV, head_dim=H // HEADS, ffn=FFN, vocab=128,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip
STEP = TrainingStep(
    layout=Layout(micro_batch_size=B, recompute="selective"), seq_len=S, software=FSDP.software
)
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Alive(TorchDispatchMode):
    """Storages that operators made and that something still holds; views of `others` are none."""

    def __init__(self, others):
        super().__init__()
        self.others = {each.untyped_storage().data_ptr() for each in others}
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage.data_ptr()] = (weakref.ref(storage), storage.nbytes())
        return out

    def held_bytes(self):
        gc.collect()
        alive = [
            at for at, (storage, _) in self.made.items() if storage() is not None and at not in self.others
        ]
        return sum(self.made[at][1] for at in alive)


class OneKernelNorm(torch.autograd.Function):
    """Keeps its input and a number a token, as the kernels of norms do on accelerators; torch's own on a CPU is several."""

    @staticmethod
    def forward(ctx, x):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, scale)
        return (x * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        part = (gradient * x).float().mean(-1, keepdim=True) * scale**3
        return (gradient * scale - x * part).to(x.dtype)


def block_weights_and_input(kv_heads=KV):
    torch.manual_seed(0)

    def weight(rows, columns):
        return (torch.randn(rows, columns) / columns**0.5).bfloat16().requires_grad_()

    head = H // HEADS
    q, k, v, o = weight(H, H), weight(kv_heads * head, H), weight(kv_heads * head, H), weight(H, H)
    gate, up, down = weight(FFN, H), weight(FFN, H), weight(H, FFN)
    turns = torch.polar(torch.ones(S, 1, head // 2), torch.randn(S, 1, head // 2))

    def rotated(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(3).to(x.dtype)

    def block(x):
        y = OneKernelNorm.apply(x)
        queries, keys, values = (linear(y, each).view(B, S, -1, head) for each in (q, k, v))
        repeated = (each.repeat_interleave(HEADS // kv_heads, 2) for each in (rotated(keys), values))
        heads = [each.transpose(1, 2) for each in (rotated(queries), *repeated)]
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(B, S, H), o)
        y = OneKernelNorm.apply(x)
        return x + linear(silu(linear(y, gate)) * linear(y, up), down)

    weights = (q, k, v, o, gate, up, down, turns)
    return block, weights, torch.randn(B, S, H).bfloat16().requires_grad_()


def every_second_product():
    seen = Counter()

    def policy(ctx, op, *args, **kwargs):
        is_kept = op == ATTENTION
        if op == torch.ops.aten.mm.default:
            seen[ctx.is_recompute] += 1
            is_kept = seen[ctx.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def backward_flops(result):
    with FlopCounterMode(display=False) as counted:
        result.float().sum().backward()
    return counted.get_total_flops()


def test_kept_bytes_and_repeated_flops_are_those_of_torch_s_checkpoint():
    block, weights, x = block_weights_and_input()
    plain_flops = backward_flops(block(x))
    with Alive(weights) as alive:
        result = checkpoint(block, x, use_reentrant=False, context_fn=every_second_product)
    kept = alive.held_bytes() - result.untyped_storage().nbytes() + x.untyped_storage().nbytes()
    repeated = backward_flops(result) - plain_flops
    assert kept == operators_saved_bytes(LLAMA, STEP, 0, B * S)
    assert repeated == repeated_flops(LLAMA, STEP, 0, B * S)


def test_a_block_that_runs_again_stops_before_its_last_product():
    """As torch's checkpoint does where it is not reentrant; Hugging Face's is, and experts' results are weighed."""
    block, _, x = block_weights_and_input()
    with FlopCounterMode(display=False) as forward:
        plain = block(x)
    plain_flops = backward_flops(plain)
    repeated = backward_flops(checkpoint(block, x, use_reentrant=False)) - plain_flops
    unneeded = unneeded_products(LLAMA, STEP, 0, B * S)
    assert [each.shape for each in unneeded] == [(B * S, H, FFN, 1.0)]
    assert repeated == forward.get_total_flops() - 2 * B * S * H * FFN
    x = x.detach().requires_grad_()
    assert backward_flops(checkpoint(block, x, use_reentrant=True)) - plain_flops == forward.get_total_flops()

    classes = replace(STEP, software=replace(STEP.software, reference_code=True))
    sandwich = replace(LLAMA, norms_per_layer=4)
    experts = replace(LLAMA, experts=Experts(num_experts=8, experts_per_token=2, expert_ffn=FFN))
    for model, step in ((LLAMA, classes), (sandwich, STEP), (experts, STEP)):
        assert unneeded_products(model, step, 0, B * S) == []


@pytest.mark.parametrize("kv_heads", [HEADS, KV])
def test_without_recomputation_it_keeps_what_autograd_does(kv_heads):
    """Statistics of norms, of one number a token, are left out."""
    block, weights, x = block_weights_and_input(kv_heads)
    others = {each.untyped_storage().data_ptr() for each in weights}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    sizes = [each.untyped_storage().nbytes() for at, each in kept.items() if at not in others]
    plain = replace(STEP, layout=replace(STEP.layout, recompute="none"))
    model = replace(LLAMA, n_kv_heads=kv_heads)
    assert sum(size for size in sizes if size > 4 * B * S) == layer_saved_bytes(model, plain, 0)


def test_a_llama_keeps_its_input_q_v_attention_gate_and_down():
    per_token = 2 * (2 * H + (2 * HEADS + KV) * LLAMA.head_dim + FFN) + 4 * HEADS
    assert layer_saved_bytes(LLAMA, STEP, 0) == B * S * per_token


def test_what_experts_are_sent_is_not_kept_and_travels_again():
    """torchtitan's list of Qwen3 has no exchange between ranks."""
    sparse = replace(LLAMA, experts=Experts(num_experts=4, experts_per_token=2, expert_ffn=FFN))
    parted = replace(STEP, layout=replace(STEP.layout, data=4, expert=4))
    assert operators_saved_bytes(sparse, parted, 0, B * S) == operators_saved_bytes(sparse, STEP, 0, B * S)

    cluster = parse_cluster("4xH100")
    groups = layer_groups(parted.layout, lambda size, stride: group_of(cluster, size, stride, FITTED), False)
    slow = replace(groups, expert=replace(groups.expert, exchange_bytes_per_s=1e3))
    device = device_of(cluster.accelerator, "bfloat16", FITTED)
    again_s, slowly_s = (layer_work(sparse, parted, 0, device, each).recompute_s for each in (groups, slow))
    there_and_back = 2 * 2.0 * B * S * 2 * H
    assert slowly_s - again_s == pytest.approx(there_and_back * 0.75 / 1e3, rel=0.01)


def test_under_tensor_parallelism_sums_are_kept_as_scattered_and_the_last_product_whole():
    spread = replace(STEP.layout, tensor=2, sequence_parallel=True)
    kept = operators_saved_bytes(LLAMA, replace(STEP, layout=spread), 0, B * S)
    parted = 2 * (3 * H + (2 * HEADS + KV) * LLAMA.head_dim + FFN) + 4 * HEADS
    assert kept == pytest.approx(B * S * (parted / 2 + 2 * H))
