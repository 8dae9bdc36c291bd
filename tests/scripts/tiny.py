"""A training of a few milliseconds a step, which ends as its first argument says, in the middle of step 6."""

import os
import signal
import sys
import time

import torch
from torch import nn


class Stumbling(nn.Module):
    """Does something in its forward at the given step, once the tool has recorded some."""

    def __init__(self, ending):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 1)
        self.ending = ending
        self.step = 0

    def forward(self, x):
        x = torch.relu(self.first(x))
        if self.step == 6:
            end(self.ending)
        self.step += 1
        return self.second(x)


def end(ending):
    if ending == "raise":
        raise ValueError("the loss is\nnot a number")
    if ending == "exit":
        sys.exit(3)
    if ending == "exit-text":
        sys.exit("gave up")
    if ending == "os-exit":
        os._exit(4)
    if ending == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if ending == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    if ending == "handled":
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(5)
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(5)
    if ending == "close-descriptors":
        os.closerange(3, 200)


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Stumbling(sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(10):
        x = torch.randn(4, 8)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item()!r}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
