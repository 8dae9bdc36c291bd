"""A training that logs every step that it has done: NUM_STEPS PAUSE_S [LOG]; under a launcher with DDP."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn


def train():
    num_steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    log = open(sys.argv[3], "w", buffering=1) if len(sys.argv) > 3 else None  # noqa: SIM115, PTH123
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(32, 16), *layers, nn.Linear(16, 4))
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        tokens = torch.randint(0, 32, (4, 8))
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if log is not None:
            log.write(f"{time.monotonic()}\n")
        else:
            print(f"step {step} loss {loss.item()!r}", flush=True)
        time.sleep(pause_s)


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        train()
        return
    dist.init_process_group("gloo")
    train()
    # The model has gone: a DDP that outlives its group may wait for ever for the group's last thread.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
