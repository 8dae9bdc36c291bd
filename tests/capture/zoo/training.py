"""What the trainings of the zoo share: a loop of five steps that prints its losses."""

import sys

import torch

STEPS = 5


def train(model, loss_of, optimizer=None, accumulate=1):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        for _ in range(accumulate):
            loss = loss_of(model)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.stdout.write(f"{step} {loss.item()!r}\n")  # one write, also where several ranks print at once
