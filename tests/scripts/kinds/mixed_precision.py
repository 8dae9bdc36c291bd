"""Accumulates gradients over two micro-batches, in mixed precision with a scaler, in a thread."""

import threading

import torch
from small import model_and_optimizer


def train():
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for index in range(10):
        x = torch.randn(3, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        scaler.scale(loss / 2).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            optimizer.zero_grad()
        print(repr(loss.item()), scaler.get_scale())


thread = threading.Thread(target=train)
thread.start()
thread.join()
