"""Hogwild (arXiv:1106.5730): two processes train one model in shared memory, without a lock."""

import torch
import torch.multiprocessing as mp
from small import model_and_optimizer, step


def train(number, model, together):
    torch.manual_seed(number)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    together.wait()
    for _ in range(300):
        step(model, optimizer)


def loss_of(model, x):
    with torch.no_grad():
        return (model(x) - x.sum(dim=1, keepdim=True)).square().mean().item()


if __name__ == "__main__":
    mp.set_start_method("spawn")
    model = model_and_optimizer()[0]
    x = torch.randn(64, 4)
    before = loss_of(model, x)
    print(repr(before), flush=True)
    model.share_memory()
    together = mp.Barrier(2)
    workers = [mp.Process(target=train, args=(number, model, together)) for number in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print([worker.exitcode for worker in workers], loss_of(model, x) < 0.5 * before)
