"""A small network of convolutions on random images: python convolutions.py MICRO_BATCH NUM_MICRO_BATCHES [AUTOCAST_DTYPE]"""

import sys

import torch
from torch import nn


def block(channels, out, stride=1):
    return nn.Sequential(
        nn.Conv2d(channels, out, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, stride, padding=1),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 5, padding=2),
    )


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    nn.Sequential(*(block(8, 8) for _ in range(2))),
    block(8, 32, stride=2),
    nn.Conv2d(32, 32, 1, stride=2),
    nn.Conv2d(32, 32, 3, padding=1, groups=4),
    nn.Flatten(),
    nn.Linear(32 * 6 * 6, 10),
)
size, parts = map(int, sys.argv[1:3])
dtype = getattr(torch, sys.argv[3]) if sys.argv[3:] else None
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    for _ in range(parts):
        images, labels = torch.randn(size, 3, 24, 24), torch.randint(10, (size,))
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        del loss
    optimizer.step()
    optimizer.zero_grad()
