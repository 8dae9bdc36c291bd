"""Calls collectives in every way that a script may, and prints what it did: [operation, bytes, ranks]."""

import json
import threading

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
pairs = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
pair = pairs[rank // 2]
other = rank ^ 1
done = []


def did(operation, size_bytes, ranks=size):
    done.append([operation, size_bytes, ranks])


def plainly(x):
    dist.all_reduce(x)
    did("all_reduce", 400)
    dist.broadcast(x, 0)
    did("broadcast", 400)
    dist.all_gather_into_tensor(torch.empty(100 * size), x)
    did("all_gather", 400 * size)
    dist.all_gather([torch.empty(100) for _ in range(size)], x)
    did("all_gather", 400 * size)
    dist.reduce_scatter_tensor(torch.empty(100), torch.ones(100 * size))
    did("reduce_scatter", 400 * size)
    dist.all_to_all_single(torch.empty(100 * size), torch.ones(100 * size))
    did("all_to_all", 400 * size)
    dist.reduce(x, 0)
    did("reduce", 400)
    dist.barrier()
    did("barrier", 0)


def later(x):
    """Two under way, waited for in the other order; and one that waits right away."""
    first = dist.all_reduce(torch.ones(10), async_op=True)
    second = dist.all_reduce(torch.ones(20), async_op=True)
    second.wait()
    first.wait()
    did("all_reduce", 40)
    did("all_reduce", 80)


def in_a_group(x):
    dist.all_reduce(torch.ones(30), group=pair)
    did("all_reduce", 120, 2)


def between_two(x):
    received = torch.empty(100)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, received, other)]
    )
    for work in works:
        work.wait()
    did("send", 400)
    did("recv", 400)


def functionally(x):
    functional.all_reduce(torch.ones(50), "sum", dist.group.WORLD).sum()
    did("all_reduce", 200)
    functional.all_gather_tensor(torch.ones(50), 0, dist.group.WORLD).sum()
    did("all_gather", 200 * size)
    functional.reduce_scatter_tensor(torch.ones(50 * size), "sum", 0, dist.group.WORLD).sum()
    did("reduce_scatter", 200 * size)


def objects(x):
    """Two all_gathers each: the sizes, then the bytes, padded to the longest."""
    dist.all_gather_object([None] * size, {"rank": 7})
    did("all_gather", 8 * size)
    did("all_gather", None)


def from_a_thread(x):
    thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(60)))
    thread.start()
    thread.join()
    did("all_reduce", 240)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.talk = nn.Linear(8, 8)

    def forward(self, x, ways):
        for way in ways:
            way(torch.ones(100))
        return self.talk(x).sum()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
WAYS = (plainly, later, in_a_group, between_two, functionally, objects, from_a_thread)
for _ in range(4):
    done.clear()
    model(torch.ones(2, 8), WAYS).backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print(json.dumps(done))
dist.destroy_process_group()
