"""LBFGS: one step of the optimizer is many passes of the model. Asks first whether torch is there."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise SystemExit("torch is not installed")

import torch
from small import model_and_optimizer

model = model_and_optimizer()[0]
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
x = torch.randn(6, 4)


def closure():
    optimizer.zero_grad()
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    loss.backward()
    return loss


for _ in range(4):
    print(repr(optimizer.step(closure).item()))
