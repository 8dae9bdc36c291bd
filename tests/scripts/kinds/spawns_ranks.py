"""Starts its own ranks, by torch.multiprocessing.spawn; the second fails at the end if it is told to.

The model is let go before the group is. A DDP that outlives its group ends it with Python's lock held, and waits for
ever if Gloo's thread asks for that lock to let go of its last operation (torch 2.13: one plain run in ten).
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small import model_and_optimizer, step
from torch.nn.parallel import DistributedDataParallel


def train(rank):
    model = DistributedDataParallel(model_and_optimizer()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        loss = step(model, optimizer)
        if rank == 0:
            print(repr(loss), flush=True)


def be_a_rank(rank, num_ranks, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    train(rank)
    dist.destroy_process_group()
    if rank == 1 and sys.argv[1:] == ["fail"]:
        raise ValueError("the second rank fails")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try:
            mp.spawn(be_a_rank, args=(2, f"{directory}/store"), nprocs=2)
        except mp.ProcessRaisedException as error:
            lines = [line.strip() for line in str(error).splitlines()]
            print([line for line in lines if line and "File" not in line and "^" not in line])
            sys.exit(3)
