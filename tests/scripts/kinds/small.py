"""The smallest training, which the scripts beside it share as a project's scripts share a module."""

import torch
from torch import nn


def model_and_optimizer(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, x=None):
    x = torch.randn(3, 4) if x is None else x
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(num_steps=5):
    model, optimizer = model_and_optimizer()
    for _ in range(num_steps):
        print(repr(step(model, optimizer)), flush=True)
