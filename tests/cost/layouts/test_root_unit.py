"""FSDP's root unit: its gradients are whole until the backward ends, and those of layers are not."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.memory import StageContents, stage_memory
from memadvisor.cost.layouts.root_unit import root_gradient_bytes, root_reduction_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import Lora
from memadvisor.software_dtypes import with_lora
from memadvisor.software_torch import FSDP, TORCHTUNE

LLAMA = Architecture(
    name="llama", n_layers=2, hidden=1024, n_heads=8, n_kv_heads=8, head_dim=128, ffn=2816, vocab=32000,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip
WHOLE = StageContents(layers=(0, 1), embeddings=1, heads=1)
HEAD = 32000 * 1024
SHARDED = TrainingStep(layout=Layout(data=4, zero_stage=3), seq_len=512, software=FSDP.software)


def with_software(software, **layout):
    return replace(SHARDED, software=software, layout=replace(SHARDED.layout, **layout))


def test_the_head_s_gradient_is_whole_in_two_bytes():
    assert root_gradient_bytes(SHARDED, HEAD) == 2 * HEAD
    tensor = with_software(FSDP.software, tensor=2, data=2)
    assert root_gradient_bytes(tensor, HEAD) == HEAD


def test_at_the_end_both_ends_are_copied_to_be_reduced():
    assert root_reduction_bytes(SHARDED, 2 * HEAD) == (2 + 4) * 2 * HEAD


@pytest.mark.parametrize(
    "step",
    [
        with_software(FSDP.software, data=1),
        with_software(FSDP.software, zero_stage=2),
        with_software(TORCHTUNE.software),  # units of their own
        with_software(with_lora(FSDP.software, Lora(rank=8))),  # frozen
        with_software(replace(FSDP.software, defers_reduction=True), num_microbatches=2),  # all are whole
    ],
)
def test_elsewhere_there_is_none(step):
    assert root_gradient_bytes(step, HEAD) == root_reduction_bytes(step, HEAD) == 0


def test_gradients_of_one_microbatch_come_as_activations_go():
    """Where the backward begins there are none but the head's: 10 GB of activations let all others hide behind them."""
    late = stage_memory(LLAMA, SHARDED, WHOLE, 10e9, FITTED)
    there = stage_memory(
        LLAMA, with_software(replace(FSDP.software, lets_gradients_go=False)), WHOLE, 10e9, FITTED
    )
    shards = 4 * (LLAMA.num_parameters() - LLAMA.hidden) / 4  # the last norm is not counted

    assert there.allocated_bytes - late.allocated_bytes == pytest.approx(shards)
    assert late.gradient_bytes == 0


def test_where_the_backward_ends_shards_and_the_root_s_gradients_are_there():
    found = stage_memory(LLAMA, SHARDED, WHOLE, 0.0, FITTED)
    shards = LLAMA.num_parameters() - LLAMA.hidden
    beside = found.head_bytes + max(0.0, found.buffer_bytes - _gathered())

    assert found.gradient_bytes + beside == pytest.approx(shards + (2 + 4) * 2 * HEAD)


def _gathered():
    """Two layers in two bytes, both ends, and a layer's gradients on their way in four."""
    layer = LLAMA.shared_layer_parameters(0)
    return 2 * 2 * layer + 2 * 2 * HEAD + 4 * layer


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 16, bias=False)

    def forward(self, tokens):
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = stream + layer(stream)
        return self.head(stream)


def test_torch_keeps_the_root_s_gradient_whole_until_the_backward_ends():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        seen = []
        model.layers[0].register_full_backward_pre_hook(
            lambda *_: seen.append((model.head.weight.grad, model.layers[2].weight.grad))
        )
        model(torch.zeros(2, dtype=torch.int64)).sum().backward()
    finally:
        dist.destroy_process_group()

    (head, layer) = seen[0]
    assert head.dtype == torch.bfloat16 and not hasattr(head, "to_local")
    assert layer.to_local().dtype == torch.float32  # reduced to its shard
