"""SGD written by hand: there is no optimizer of torch.optim."""

import torch
from small import model_and_optimizer

model = model_and_optimizer()[0]
for _ in range(8):
    x = torch.randn(3, 4)
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    print(repr(loss.item()))
