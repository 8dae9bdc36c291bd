"""Models that train against each other, or a pupil of a frozen teacher (`--teacher`), each given to fully_shard. Prints losses."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

WIDTH, ROWS = 64, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def sharded(num_outputs):
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, num_outputs))
    for block in model[:3]:
        fully_shard(block)
    return fully_shard(model)


def against_each_other():
    """What one makes, the other tells from what is real, twice in each step."""
    maker, judge = sharded(WIDTH), sharded(1)
    makers, judges = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (maker, judge))
    while True:
        made = maker(torch.randn(ROWS, WIDTH))
        judges.zero_grad()
        loss = F.softplus(-judge(torch.randn(ROWS, WIDTH))).mean() + F.softplus(judge(made.detach())).mean()
        loss.backward()
        judges.step()
        makers.zero_grad()
        F.softplus(-judge(made)).mean().backward()
        makers.step()
        yield loss


def taught():
    teacher, pupil = sharded(8).requires_grad_(False), sharded(8)
    optimizer = torch.optim.AdamW(pupil.parameters())
    while True:
        x = torch.randn(ROWS, WIDTH)
        with torch.no_grad():
            wanted = teacher(x)
        optimizer.zero_grad()
        loss = F.mse_loss(pupil(x), wanted)
        loss.backward()
        optimizer.step()
        yield loss


dist.init_process_group("gloo")
torch.manual_seed(0)
losses = taught() if "--teacher" in sys.argv else against_each_other()
for _, loss in zip(range(4), losses, strict=False):
    if dist.get_rank() == 0:
        print(loss.item(), flush=True)
dist.destroy_process_group()
