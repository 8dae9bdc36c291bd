"""Train a small convolutional net as a pipeline that torch itself traces and cuts, into stages of unequal work.

torchrun --nproc-per-node 2 samples/train_pipeline_conv.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

SCHEDULES = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.second(F.relu(self.norm(self.first(x))))


class Down(nn.Module):
    """Half as high and as wide, of other channels."""

    def __init__(self, channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, out_channels, 3, stride=2, padding=1)

    def forward(self, x):
        return F.relu(self.conv(x))


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.high = nn.ModuleList(Residual(width) for _ in range(depth))
        self.down = Down(width, 2 * width)
        self.low = nn.ModuleList(Residual(2 * width) for _ in range(depth))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.high:
            x = block(x)
        x = self.down(x)
        for block in self.low:
            x = block(x)
        return self.head(x.mean((2, 3)))


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="gpipe")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3, help="residual blocks of either size")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--micro-batch", type=int, default=8, help="images of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    net = Net(args.width, args.depth)
    names = [f"high.{i}" for i in range(args.depth)] + [f"low.{i}" for i in range(args.depth)]
    cuts = [names[len(names) * stage // num_ranks] for stage in range(1, num_ranks)]
    traced = pipelining.pipeline(
        net,
        (torch.randn(args.micro_batch, 3, args.size, args.size),),
        split_spec=dict.fromkeys(cuts, pipelining.SplitPoint.BEGINNING),
    )
    stage = traced.build_stage(rank, torch.device("cpu"))
    schedule = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        batch = args.micro_batch * args.micro_batches
        images = torch.randn(batch, 3, args.size, args.size, generator=generator)
        targets = torch.randint(10, (batch,), generator=generator)
        losses = []
        inputs = (images,) if rank == 0 else ()
        outputs = {"target": targets, "losses": losses} if rank == num_ranks - 1 else {}
        schedule.step(*inputs, **outputs, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print(f"step {step}  loss {sum(loss.item() for loss in losses) / len(losses)!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
