"""A short training, each time with another notion of what a long step is: `python long_steps.py DIR NAME=NODES...`."""

import gc
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memadvisor
from memadvisor.capture import tracing


class Residual(nn.Module):
    """Gradients meet where it begins; what its layers keep is made again."""

    def __init__(self, channels, is_checkpointed):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1)
        )
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        if self.is_checkpointed:
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + self.layers(x)


def train(directory, num_micro_batches=2):
    """A run of four steps, of which the third is traced."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), Residual(8, True), Residual(8, False), nn.Flatten(), nn.LazyLinear(5)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    gc.collect()
    losses = []
    with memadvisor.profile(directory) as profile:
        for _ in range(4):
            for _ in range(num_micro_batches):
                loss = nn.functional.cross_entropy(model(torch.rand(4, 3, 9, 9)), torch.arange(4)) / 4.0
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, profile.run.ranks[0]


if __name__ == "__main__":
    for word in sys.argv[2:]:
        name, _, nodes = word.partition("=")
        tracing._NODES_OF_LONG_STEP = int(nodes)
        print(*train(Path(sys.argv[1]) / name)[0])
