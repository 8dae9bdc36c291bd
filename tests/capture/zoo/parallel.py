"""Trainings of two ranks, each under another of torch's own engines. Only under RANK, WORLD_SIZE and the like."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from language import Block, Gpt, next_token_loss
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training import train


@contextmanager
def world():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def train_ranks(model):
    train(model, next_token_loss, torch.optim.AdamW(model.parameters(), foreach=False))


def ddp_copies():
    train_ranks(DistributedDataParallel(Gpt(layers=2), gradient_as_bucket_view=False))


def ddp_views():
    train_ranks(DistributedDataParallel(Gpt(layers=2), gradient_as_bucket_view=True))


def ddp_static():
    train_ranks(DistributedDataParallel(Gpt(layers=2), static_graph=True))


def fsdp1():
    train_ranks(
        FullyShardedDataParallel(
            Gpt(layers=2),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    )


def sharded(**options):
    model = Gpt(layers=2)
    for block in model.blocks:
        fully_shard(block, **options)
    train_ranks(fully_shard(model, **options))


def fsdp2_resharded():
    sharded(reshard_after_forward=True)


def fsdp2_kept():
    sharded(reshard_after_forward=False)


def fsdp2_bf16():
    sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def tensor_parallel():
    """Gathers what a layer's columns made, reduces what its rows did."""
    model = Gpt(layers=2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "qkv": ColwiseParallel(output_layouts=Replicate()),
        "mlp.1": ColwiseParallel(),
        "mlp.3": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    train_ranks(model)


KINDS = [
    ddp_copies, ddp_views, ddp_static, fsdp1, fsdp2_resharded, fsdp2_kept, fsdp2_bf16, tensor_parallel,
]  # fmt: skip
