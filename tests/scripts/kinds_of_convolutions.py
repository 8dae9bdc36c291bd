"""Convolutions of many kinds on random data: python kinds_of_convolutions.py MICRO_BATCH NUM_MICRO_BATCHES"""

import sys

import torch
from torch import nn


class Up(nn.Module):
    """A decoder's step beside a skip, whose gradient is a slice."""

    def __init__(self, channels):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)
        self.body = nn.Conv2d(channels, channels // 2, 3, padding=1)

    def forward(self, maps):
        skip = maps.new_zeros(len(maps), maps.shape[1] // 2, *(2 * side for side in maps.shape[2:]))
        return self.body(torch.cat([self.up(maps), skip], dim=1))


def flat():
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, stride=2, padding=1),
        nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=2, dilation=2),
            nn.Conv2d(16, 32, 1),
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
        ),
        nn.Sequential(nn.ConvTranspose2d(32, 16, 3, padding=1), nn.ConvTranspose2d(16, 16, 2, 2, groups=2)),
        Up(16),
    )


def deep():
    return nn.Sequential(
        nn.Conv3d(2, 8, (3, 5, 5), stride=(1, 2, 2), padding=(1, 2, 2)),
        nn.Sequential(nn.Conv3d(8, 16, 3, padding=1, bias=False), nn.Conv3d(16, 12, 1)),
        nn.Sequential(
            nn.Conv3d(12, 16, (1, 3, 3), padding=(0, 1, 1)), nn.Conv3d(16, 16, (3, 1, 1), padding=(1, 0, 0))
        ),
        nn.Sequential(nn.Conv3d(16, 8, 3, padding=2, dilation=2), nn.ConvTranspose3d(8, 4, 2, stride=2)),
    )


def long():
    return nn.Sequential(
        nn.Conv1d(1, 24, 10, stride=5),
        nn.Sequential(nn.Conv1d(24, 24, 3, padding=2, dilation=2), nn.Conv1d(24, 40, 1)),
        nn.Sequential(nn.Conv1d(40, 40, 8, padding=4, groups=4), nn.ConvTranspose1d(40, 20, 4, stride=2)),
    )


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.flat, self.last = flat(), flat().to(memory_format=torch.channels_last)
        self.deep, self.long = deep(), long()

    def forward(self, images, volumes, waves):
        last = images.contiguous(memory_format=torch.channels_last)
        outputs = self.flat(images), self.last(last), self.deep(volumes), self.long(waves)
        return sum(output.square().mean() for output in outputs)


torch.manual_seed(0)
model = Branches()
size, parts = map(int, sys.argv[1:3])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5):
    for _ in range(parts):
        model(
            torch.randn(size, 3, 24, 24), torch.randn(size, 2, 4, 16, 16), torch.randn(size, 1, 800)
        ).backward()
    optimizer.step()
    optimizer.zero_grad()
