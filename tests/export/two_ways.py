"""A rank of two: trains a GPT under DDP, and sharded by each exported module that is named, and prints what it saw.

two_ways.py RANK RENDEZVOUS MODULE...
"""

import importlib.util
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from samples.train_gpt import GPT


def train(shard, rank, num_steps=3):
    torch.manual_seed(0)
    model = shard(GPT(layers=4, dim=32, heads=2, seq=16, dropout=0.1, tied=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, kept = [], {}
    for step in range(num_steps):
        torch.manual_seed(2 * step + rank)
        tokens = torch.randint(256, (4, 17))
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: count(saved, kept), lambda saved: saved):
            loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    local = [getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()]
    shards = sum(p.numel() for p in local)
    return {"losses": losses, "kept_bytes": sum(kept.values()), "num_local_parameters": shards}


def count(saved, kept):
    kept[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
    return saved


def load(path):
    spec = importlib.util.spec_from_file_location("exported", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    seen = [train(DistributedDataParallel, rank)]
    for path in sys.argv[3:]:
        exported = load(path)
        seen.append(train(lambda model, exported=exported: exported.apply(model, mesh), rank))
    print(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
