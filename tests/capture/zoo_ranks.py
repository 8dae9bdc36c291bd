"""Trainings of several ranks, as a script: `zoo_ranks.py ddp|local|fsdp|tensor` under a launcher."""

import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

# The process groups' own account of what they ran, torch's flight recorder.
os.environ["TORCH_FR_BUFFER_SIZE"] = "100000"

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent / "zoo"))
from language import Gpt, next_token_loss
from training import train


def operations():
    """[group, operation, shapes] of all that ran, in order, whoever called it and from which language."""
    entries = json.loads(_dump_fr_trace_json())["entries"]
    return [[e["process_group"][0], e["profiling_name"], e["input_sizes"]] for e in entries]


def main(kind):
    dist.init_process_group("gloo")
    # Held until the model has gone. Else DDP's reducer, which goes with it, is the last that holds the group, and ends
    # it without letting go of the interpreter's lock, which the group's last thread may wait for: torch hangs then.
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = Gpt()
    if kind in ("ddp", "local"):
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            parallelize_module(block.mlp, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    # As local SGD trains: the ranks part, and no gradient is sent.
    with model.no_sync() if kind == "local" else nullcontext():
        train(model, next_token_loss, torch.optim.AdamW(model.parameters(), foreach=False))
    ran = operations()
    digest = hashlib.sha256(json.dumps(ran).encode()).hexdigest()
    # One write a line, and a short one: ranks print at once.
    sys.stdout.write(f"{dist.get_rank()} {len(ran)} collectives {digest}\n")
    sys.stdout.flush()
    dist.destroy_process_group()
    del model, group


if __name__ == "__main__":
    main(sys.argv[1])
