"""Ranks that average gradients by themselves, without DistributedDataParallel; with `--split` layers meet too. Prints losses."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn

DIM = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))
        if "--split" in sys.argv:
            x = x + dist.nn.all_reduce(x.mean(0, keepdim=True))
        return x


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
torch.manual_seed(1 + dist.get_rank())
for _ in range(4):
    x = torch.randn(64, 32, DIM)
    loss = (model(x) - x).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item(), flush=True)
dist.destroy_process_group()
