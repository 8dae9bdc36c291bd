"""Data-parallel training in which one rank, the one named as argument, is slow by construction."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, slow = dist.get_rank(), int(sys.argv[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x):
        if rank == slow:
            time.sleep(0.4)
        return self.layers(x).square().mean()


torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 5):
    loss = model(torch.ones(4, 16))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(rank, loss.item(), dist.group.WORLD._get_sequence_number_for_group(), flush=True)
dist.destroy_process_group()
