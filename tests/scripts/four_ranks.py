"""Four ranks; after step 5 rank 1 is killed, rank 2 hangs until it is, and the others end by themselves."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn


def main():
    rank, done = int(os.environ["RANK"]), Path(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.3)  # so that every step is flushed
    dist.barrier()  # nothing of the last step is under way any more
    time.sleep(0.3)
    (done / str(rank)).touch()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(600)
    time.sleep(0.6)


if __name__ == "__main__":
    main()
