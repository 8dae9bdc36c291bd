"""A script that knows nothing of ranks trains on several as it would alone on batches that many times as large."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from memadvisor.engines import single_process
from memadvisor.engines.applied import Applied
from memadvisor.engines.single_process import SingleProcess
from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.trainings import make_plan

STAGES = (0, 1, 2, 3)


def data(num_samples=48):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(num_samples, 6, generator=generator),
        torch.randint(0, 4, (num_samples,), generator=generator),
    )


class under:
    """`install` as it is in a process whose script has started no ranks; the pool's group stands for ours."""

    def __init__(self, num_ranks, zero):
        self.single = SingleProcess(num_ranks, lambda level, text: None)
        self.single._has_started = True
        self.applied = Applied(make_plan(num_ranks, zero), None, None)

    def __enter__(self):
        return self.single

    def __exit__(self, *_):
        self.applied.remove()
        self.single.remove()


def model_and_optimizer():
    torch.manual_seed(0)
    # A parametrized weight is called where it is made and looked at, and is no model of its own.
    last = weight_norm(nn.Linear(8, 4))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), last)
    assert last.weight.requires_grad
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def script(batch_size):
    """A loop as anybody writes it: two epochs, shuffled, evaluated after each. What it prints."""
    model, optimizer = model_and_optimizer()
    training = DataLoader(data(), batch_size=batch_size, shuffle=True)
    evaluation = DataLoader(data(20), batch_size=5)
    torch.manual_seed(1)
    said = [float(len(training))]
    for _ in range(2):
        model.train()
        for x, y in training:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            said += [float(F.cross_entropy(model(x), y)) for x, y in evaluation]
    said.append(float(torch.rand(())))  # the stream of random numbers
    return said


def trains_as_alone(rank: int, num_ranks: int) -> dict[str, list[float]]:
    # Rank 0's order holds, whatever the others draw.
    found = {"alone": script(4 * num_ranks)}
    for zero in STAGES:
        with under(num_ranks, zero):
            found[str(zero)] = script(4)
    return found


def test_a_script_of_one_process_trains_on_two_as_on_batches_twice_as_large():
    one, other = run_ranks(trains_as_alone, 2, 2)
    assert one == other
    alone = one.pop("alone")
    assert alone[0] == 6.0 and len(alone) == 2 + 2 * 4
    for kind, said in one.items():
        torch.testing.assert_close(said, alone, rtol=1e-5, atol=0, msg=lambda text: f"{kind}: {text}")  # noqa: B023


def orders_that_differ(rank: int, num_ranks: int) -> list[list[int]]:
    numbers = TensorDataset(torch.arange(10))
    torch.manual_seed(rank)  # each rank would shuffle in its own way
    with under(num_ranks, 0):
        batched = DataLoader(numbers, batch_size=2, shuffle=True)
        bare = DataLoader(numbers, batch_size=None, sampler=RandomSampler(numbers))
        first = [int(x) for (batch,) in batched for x in batch]
        model, _ = model_and_optimizer()
        model(torch.zeros(1, 6)).sum().backward()
        second = [int(x) for (x,) in bare]
        with torch.no_grad():
            whole = [int(x) for (batch,) in DataLoader(numbers, batch_size=3) for x in batch]
    return [first, second, whole]


def test_ranks_share_one_order_and_what_is_only_looked_at_is_read_whole():
    one, other = run_ranks(orders_that_differ, 2, 2)
    assert one[2] == other[2] == list(range(10))
    # Five batches of two: the last round is filled up with the first batch.
    assert len(one[0]) == len(other[0]) == 6
    assert sorted(one[0] + other[0][:4]) == list(range(10))
    assert sorted(one[1] + other[1]) == list(range(10))


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(6), torch.tensor(0)


class Words(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, word):
        return torch.zeros(6), torch.tensor(0)


class Spoken:
    def __iter__(self):
        return iter(["one", "two", "three", "four"])

    def __len__(self):
        return 4


def train_on(loader):
    model, optimizer = model_and_optimizer()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def own_batches():
    model, optimizer = model_and_optimizer()
    F.cross_entropy(model(torch.zeros(2, 6)), torch.zeros(2, dtype=torch.int64)).backward()
    optimizer.step()


def second_model_is_never_called():
    model, _ = model_and_optimizer()
    weight = torch.zeros(6, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), weight], lr=0.1)
    for x, y in DataLoader(data(), batch_size=4):
        F.cross_entropy(model(x * weight), y).backward()
        optimizer.step()


def reads_through_first():
    loader = DataLoader(data(), batch_size=4)
    _ = sum(float(x.mean()) for x, _ in loader)
    train_on(loader)


def starts_late():
    _ = next(iter(DataLoader(data(), batch_size=4)))
    dist.init_process_group("gloo")


REFUSED = {
    "own batches": (own_batches, "not read its data from a torch DataLoader"),
    "endless": (lambda: train_on(DataLoader(Endless(), batch_size=2)), "iterable dataset"),
    "words": (lambda: train_on(DataLoader(Words(), sampler=Spoken(), batch_size=2)), "whole numbers"),
    "a weight of its own": (second_model_is_never_called, "of no model that the script has called"),
    "read through": (reads_through_first, "reads a DataLoader through"),
    "late start": (starts_late, "before it starts torch.distributed"),
}


def refusals(rank: int, num_ranks: int) -> dict[str, str]:
    found = {}
    for name, (run, _) in REFUSED.items():
        with under(num_ranks, 0):
            try:
                run()
                found[name] = "went on"
            except PlanError as error:
                found[name] = error.one_line()
    return found


def test_what_cannot_be_dealt_is_refused():
    for found in run_ranks(refusals, 2, 2):
        for name, (_, words) in REFUSED.items():
            assert words in found[name], (name, found[name])


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "backend"),
    [(0, 2, "gloo"), (1, 2, "gloo"), (2, 2, "cpu:gloo,cuda:nccl"), (8, 2, "cpu:gloo,cuda:nccl")],
)
def test_ranks_that_share_a_gpu_are_not_given_to_nccl(monkeypatch, num_gpus, num_ranks, backend):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))
    assert single_process._backend() == backend
