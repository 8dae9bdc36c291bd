"""Worker processes of a DataLoader's three kinds, which find the script's own classes."""

import multiprocessing
import sys

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(float(index * index))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    context = multiprocessing.get_context(sys.argv[1])
    for batch in DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=context):
        loss = model(batch[:, None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(batch.tolist(), loss.item(), flush=True)
