"""Loads by workers of every kind, maps in pools of every kind, and trains processes that share a model."""

import sys

import torch
import torch.multiprocessing as mp
from small import model_and_optimizer, step
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.arange(4.0) * index / 10


def square(number):
    return number * number


def train_shared(model):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer)


if __name__ == "__main__":
    method = sys.argv[1]
    context = mp.get_context(method)
    with context.Pool(1) as pool:
        print(pool.map(square, range(5)))
    model, optimizer = model_and_optimizer()
    loader = DataLoader(Rows(), 2, num_workers=1, multiprocessing_context=context, shuffle=True)
    for batch in loader:
        print(repr(step(model, optimizer, batch)), flush=True)
    model.share_memory()
    process = context.Process(target=train_shared, args=(model,))
    process.start()
    process.join()
    print(process.exitcode, repr(sum(p.sum().item() for p in model.parameters())))
