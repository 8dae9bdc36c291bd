"""Knows nothing of ranks: `alone.py BATCH_SIZE WORKERS FILE` trains on a DataLoader and saves what it learnt."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

batch_size, workers, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 3))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=workers)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2 * len(loader))
for _ in range(2):
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
with torch.no_grad():
    # One write: lines of ranks that share a terminal do not tear.
    sys.stdout.write(f"{float(nn.functional.mse_loss(model(data.tensors[0]), data.tensors[1]))}\n")
torch.save(model.state_dict(), file)
