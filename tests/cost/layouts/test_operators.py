"""Recomputation operator by operator, held against torch's own checkpoint with torchtitan's rule, on a Llama's block."""

import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.operators import operators_saved_bytes, repeated_flops
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import FSDP

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


def block_weights_and_input():
    torch.manual_seed(0)

    def weight(rows, columns):
        return (torch.randn(rows, columns) / columns**0.5).bfloat16().requires_grad_()

    head = H // HEADS
    q, k, v, o = weight(H, H), weight(KV * head, H), weight(KV * head, H), weight(H, H)
    gate, up, down = weight(FFN, H), weight(FFN, H), weight(H, FFN)

    def block(x):
        y = rms_norm(x, (H,))
        heads = [linear(y, each).view(B, S, -1, head).transpose(1, 2) for each in (q, k, v)]
        keys, values = (each.repeat_interleave(HEADS // KV, 1) for each in heads[1:])
        mixed = scaled_dot_product_attention(heads[0], keys, values, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).reshape(B, S, H), o)
        y = rms_norm(x, (H,))
        return x + linear(silu(linear(y, gate)) * linear(y, up), down)

    return block, (q, k, v, o, gate, up, down), torch.randn(B, S, H).bfloat16().requires_grad_()


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


def test_a_llama_keeps_its_input_q_v_attention_gate_and_down():
    per_token = 2 * (2 * H + (2 * HEADS + KV) * LLAMA.head_dim + FFN) + 4 * HEADS
    assert layer_saved_bytes(LLAMA, STEP, 0) == B * S * per_token


def test_under_tensor_parallelism_sums_are_kept_as_scattered_and_the_last_product_whole():
    spread = replace(STEP.layout, tensor=2, sequence_parallel=True)
    kept = operators_saved_bytes(LLAMA, replace(STEP, layout=spread), 0, B * S)
    parted = 2 * (3 * H + (2 * HEADS + KV) * LLAMA.head_dim + FFN) + 4 * HEADS
    assert kept == pytest.approx(B * S * (parted / 2 + 2 * H))
