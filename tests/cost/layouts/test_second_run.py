"""What a layer that runs again holds, by formula and as torch's own checkpoints hold it: storages alive at the backward's peak."""

import math
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memadvisor.architecture import LLAMA_CODE, Architecture, ReferenceCode
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.cost.layouts.second_run import second_run_bytes, working_layer_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import find_preset
from memadvisor.software_traits import Software

B, S, H, FFN, HEADS = 2, 64, 128, 344, 4
STREAM = 2 * B * S * H
LLAMA = Architecture(
    name="llama", n_layers=4, hidden=H, n_heads=HEADS, n_kv_heads=HEADS, head_dim=H // HEADS, ffn=FFN, vocab=512,
    tied_embeddings=False, gated_mlp=True, positions=0, biases=False,
)  # fmt: skip


class LiveStorages(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sizes, self.now_bytes, self.peak_bytes = {}, 0, 0

    def see(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.sizes:
            return
        self.sizes[key] = size
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key):
        self.now_bytes -= self.sizes.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(found):
            if isinstance(each, torch.Tensor):
                self.see(each)
        return found


class Block(torch.nn.Module):
    """Llama's, whose norm is one kernel, or copies its input to fp32 as Hugging Face's does."""

    def __init__(self, copies_input):
        super().__init__()
        self.copies_input = copies_input
        shapes = {"q": (H, H), "k": (H, H), "v": (H, H), "o": (H, H), "gate": (H, FFN), "up": (H, FFN)}
        for name, (depth, columns) in {**shapes, "down": (FFN, H)}.items():
            setattr(self, name, torch.nn.Linear(depth, columns, bias=False))
        self.norms = torch.nn.ParameterList([torch.ones(H), torch.ones(H)])

    def _norm(self, x, weight):
        if not self.copies_input:
            return functional.layer_norm(x, (H,), weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(x.dtype)

    def forward(self, x):
        y = self._norm(x, self.norms[0])
        q, k, v = (one(y).view(B, S, HEADS, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, S, H))
        y = self._norm(x, self.norms[1])
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def every_second_product(counts, context, operator, *args, **kwargs):
    """As torchtitan has it."""
    if operator == torch.ops.aten.mm.default:
        counts[context.is_recompute] = counts.get(context.is_recompute, 0) + 1
        return (
            CheckpointPolicy.MUST_SAVE
            if counts[context.is_recompute] % 2
            else CheckpointPolicy.PREFER_RECOMPUTE
        )
    is_attention = "attention" in str(operator)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def operators():
    return create_selective_checkpoint_contexts(partial(every_second_product, {}))


HOW = {
    "none": None,
    "full": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "operators": {"use_reentrant": False, "context_fn": operators},
}


def backward_peak_bytes(how, num_layers, copies_input):
    torch.manual_seed(0)
    blocks = [Block(copies_input).to(torch.bfloat16) for _ in range(num_layers)]
    source = torch.randn(B, S, H, dtype=torch.bfloat16, requires_grad=True)
    live = LiveStorages()
    for each in (source, *(parameter for block in blocks for parameter in block.parameters())):
        each.grad = torch.zeros_like(each)
        live.see(each), live.see(each.grad)
    states_bytes = live.now_bytes
    with live:
        x = source * 1.0
        for block in blocks:
            x = block(x) if HOW[how] is None else checkpoint(block, x, **HOW[how])
        gradient = torch.zeros_like(x)
        live.peak_bytes = 0
        x.backward(gradient)
    return live.peak_bytes - states_bytes


def predicted_bytes(how, num_layers, copies_input):
    """All but what is the same however it runs."""
    code = LLAMA_CODE if copies_input else ReferenceCode()
    model = replace(LLAMA, code=code)
    software = replace(
        find_preset("fsdp").software, reference_code=copies_input, stops_early=how != "reentrant"
    )
    recompute = {"none": "none", "operators": "selective"}.get(how, "full")
    step = TrainingStep(layout=Layout(micro_batch_size=B, recompute=recompute), seq_len=S, software=software)
    kept = layer_saved_bytes(model, step, 0)
    return num_layers * kept + second_run_bytes(model, step, tuple(range(num_layers)))


@pytest.mark.parametrize("copies_input", [False, True])
@pytest.mark.parametrize("how", ["full", "reentrant", "operators"])
def test_what_a_second_run_holds_beside_what_one_run_does(how, copies_input):
    """The input once, but for a norm that copies it; the result where the second run does not stop before it, or has it kept."""
    measured, predicted = (
        peak_bytes(how, 1, copies_input) - peak_bytes("none", 1, copies_input)
        for peak_bytes in (backward_peak_bytes, predicted_bytes)
    )
    assert measured == predicted == STREAM * (copies_input + (how != "full"))


@pytest.mark.parametrize("how", ["full", "reentrant", "operators"])
def test_each_further_layer_has_what_it_keeps(how):
    measured, predicted = (
        peak_bytes(how, 3, False) - peak_bytes(how, 1, False)
        for peak_bytes in (backward_peak_bytes, predicted_bytes)
    )
    assert measured == pytest.approx(predicted, rel=1e-3)


def test_what_the_last_layer_has_when_the_others_backwards_are_through():
    """As much kept or run again: but for what is beside."""
    software = Software(stops_early=True)
    one_run, again = (
        working_layer_bytes(
            LLAMA,
            TrainingStep(layout=Layout(micro_batch_size=B, recompute=how), seq_len=S, software=software),
            (0, 1, 2),
            math.inf,
        )
        for how in ("none", "full")
    )
    assert one_run == again > 0
