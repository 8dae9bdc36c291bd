"""Storages of weights that get no gradient are told from those of others, also where both have one shape."""

import dataclasses

import torch
from torch import nn

import memadvisor
from memadvisor.analyzers.frozen_weights import frozen_storages


class Pair(nn.Module):
    """One unit of two weights of one shape, the second of which is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(8, 8), requires_grad=on) for on in (True, False))

    def forward(self, x):
        return x @ self.first @ self.second


def recorded(directory):
    model = nn.Sequential(Pair(), nn.Linear(8, 4).requires_grad_(False), nn.Linear(4, 2))
    optimizer = torch.optim.SGD([row for row in model.parameters() if row.requires_grad])
    with memadvisor.profile(directory) as prof:
        for _ in range(4):
            model(torch.rand(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run.ranks[0]


def test_frozen_weights_are_those_that_the_script_has_frozen(tmp_path):
    rank = recorded(tmp_path / "run")
    rows = [row for row in rank.storages if row.category == "parameter"]
    found = frozen_storages(rank)
    frozen = sorted((row.unit, row.shape) for row in rows if row.storage_id in found)
    assert frozen == [("0", "[8, 8]"), ("1", "[4, 8]"), ("1", "[4]")]

    first, second = (row for row in rows if row.unit == "0")
    assert second.storage_id in found and first.storage_id not in found


def test_where_parameters_and_storages_do_not_match_none_that_may_train_is_frozen(tmp_path):
    rank = recorded(tmp_path / "run")
    fewer = tuple(row for row in rank.parameters if row.name != "0.second")
    found = frozen_storages(dataclasses.replace(rank, parameters=fewer))
    units = {row.storage_id: row.unit for row in rank.storages}
    assert {units[storage_id] for storage_id in found} == {"1"}
