"""What a Llama's block of frozen matrices and adapters keeps, in every byte from torch's autograd."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import LINEAR, Lora
from memadvisor.software_torch import FSDP
from tests.cost.layouts.test_operators import FFN, HEADS, KV, LLAMA, B, H, OneKernelNorm, S

RANK = 4


class Adapted:
    """Frozen matrices, and adapters beside some; `in_fp32`: these are in fp32, and their operands are cast as autocast does."""

    def __init__(self, targets, in_fp32):
        torch.manual_seed(0)
        shapes = {
            "query": (H, H), "key": (KV * H // HEADS, H), "value": (KV * H // HEADS, H), "output": (H, H),
            "gate": (FFN, H), "up": (FFN, H), "down": (H, FFN),
        }  # fmt: skip
        dtype = torch.float32 if in_fp32 else torch.bfloat16
        self.in_fp32 = in_fp32
        self.frozen = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        self.pairs = {
            name: (torch.randn(RANK, columns, dtype=dtype), torch.randn(rows, RANK, dtype=dtype))
            for name, (rows, columns) in shapes.items()
            if name in targets
        }
        for pair in self.pairs.values():
            for each in pair:
                each.requires_grad_()
        # Copies for products are the weights', not the activations'.
        self.narrow = {name: tuple(each.bfloat16() for each in pair) for name, pair in self.pairs.items()}

    def weights(self):
        pairs = [each for pair in (*self.pairs.values(), *self.narrow.values()) for each in pair]
        return [*self.frozen.values(), *pairs]

    def __call__(self, x, name):
        frozen = linear(x, self.frozen[name])
        if name not in self.narrow:
            return frozen
        down, up = self.narrow[name]
        taken = x.float().bfloat16() if self.in_fp32 else x
        return frozen + linear(linear(taken, down), up)


def block(x, product):
    head = H // HEADS
    turned = torch.polar(torch.ones(S, 1, head // 2), torch.ones(S, 1, head // 2))

    def rotated(y):
        pairs = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turned).flatten(3).to(y.dtype)

    y = OneKernelNorm.apply(x)
    queries, keys, values = (product(y, name).view(B, S, -1, head) for name in ("query", "key", "value"))
    repeated = (each.repeat_interleave(HEADS // KV, 2) for each in (rotated(keys), values))
    heads = [each.transpose(1, 2) for each in (rotated(queries), *repeated)]
    mixed = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(B, S, H)
    x = x + product(mixed, "output")
    y = OneKernelNorm.apply(x)
    return x + product(silu(product(y, "gate")) * product(y, "up"), "down"), turned


def kept_bytes(product):
    x = torch.randn(B, S, H).bfloat16().requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, turned = block(x, product)
    others = {each.untyped_storage().data_ptr() for each in (*product.weights(), turned)}
    sizes = {at: tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in others}
    return sum(sizes.values()) - 2 * 4 * B * S  # statistics of both norms


@pytest.mark.parametrize("targets", [("query", "value"), ("output", "down"), LINEAR])
@pytest.mark.parametrize("in_fp32", [False, True])
def test_a_layer_keeps_what_autograd_does(targets, in_fp32):
    software = replace(
        FSDP.software,
        parameter_bytes=4 if in_fp32 else 2,
        lora=Lora(rank=RANK, targets=targets),
    )
    step = TrainingStep(layout=Layout(micro_batch_size=B), seq_len=S, software=software)
    assert kept_bytes(Adapted(targets, in_fp32)) == layer_saved_bytes(LLAMA, step, 0)
