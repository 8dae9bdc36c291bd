"""Trains with BATCH samples from STEP on; where memory runs out it raises, or halves the batch and goes on.

    hungry.py BATCH raise|halve|own [STEP]

`own`: the model itself raises torch's error once, as an allocator would inside it; then the batch is halved.
"""

import sys

import torch
from torch import nn

BATCH, THEN = int(sys.argv[1]), sys.argv[2]
STEP = int(sys.argv[3]) if len(sys.argv) > 3 else 0


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(torch.relu(self.wide(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.last = nn.Linear(64, 1)
        self.fails = None

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.fails is not None and number == 2:
                raise self.fails
        return self.last(x)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if THEN == "own":  # an allocator's own error, from inside the model
        model.fails = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
    batch = BATCH
    for step in range(5):
        while True:
            try:
                x = torch.randn(batch if step >= STEP else 8, 16)
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                break
            except torch.OutOfMemoryError as error:
                if THEN == "raise":
                    raise
                assert error is model.fails or model.fails is None
                print("out of memory at", batch, flush=True)
                model.fails = x = loss = None
                optimizer.zero_grad()
                batch //= 2
        optimizer.zero_grad()
        print(f"step {step} batch {batch} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
