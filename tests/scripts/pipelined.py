"""Blocks with dropout as a pipeline on two ranks, whose schedule is the first argument; the last stage prints its losses."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

WIDTH, BATCH, NUM_MICRO_BATCHES, NUM_BLOCKS = 64, 24, 4, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(hidden), 0.1)


class Part(nn.Module):
    def __init__(self, num_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


dist.init_process_group("gloo")
rank, kind = dist.get_rank(), getattr(pipelining, sys.argv[1])
is_single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
own = [rank] if is_single else [rank, rank + 2]
num_stages = 2 * len(own)
torch.manual_seed(rank)
parts = [Part(NUM_BLOCKS // num_stages) for _ in own]
stages = [
    pipelining.PipelineStage(part, index, num_stages, torch.device("cpu"))
    for part, index in zip(parts, own, strict=True)
]
schedule = kind(stages[0] if is_single else stages, NUM_MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([parameter for part in parts for parameter in part.parameters()])
for _ in range(5):
    losses = []
    inputs = (torch.randn(BATCH, 16, WIDTH),) if rank == 0 else ()
    targets = {"target": torch.ones(BATCH, 16, WIDTH), "losses": losses} if rank == 1 else {}
    schedule.step(*inputs, **targets)
    optimizer.step()
    optimizer.zero_grad()
    if losses:
        print([loss.item().hex() for loss in losses], flush=True)
dist.destroy_process_group()
