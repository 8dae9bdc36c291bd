"""A loop under Hugging Face's accelerate, with its gradient accumulation, on as many ranks as were launched."""

import torch
from accelerate import Accelerator
from small import model_and_optimizer
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer = model_and_optimizer()
loader = DataLoader(torch.randn(32 * accelerator.num_processes, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(repr(loss.item()))
