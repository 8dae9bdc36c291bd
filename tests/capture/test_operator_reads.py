"""The traced step tells what each operator was given, and which operator each node of the backward is of."""

from __future__ import annotations

import torch
from torch import nn

import memadvisor


def recorded(directory, model, given):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(directory) as prof:
        for _ in range(4):
            model(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run.ranks[0]


def test_a_product_reads_its_weight_and_what_was_made_before(tmp_path):
    rank = recorded(
        tmp_path, nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(64, 16)
    )
    rows = {row.storage_id: row for row in rank.storages}
    reads = {}
    for row in rank.operator_reads:
        reads.setdefault(row.operator_id, []).append(rows[row.storage_id])
    products = [row for row in rank.operators if row.name == "aten::addmm"]
    assert [row.module for row in products] == ["0", "2"]
    bias, given, weight = reads[products[1].operator_id]
    assert (bias.category, weight.category, weight.shape) == ("parameter", "parameter", "[4, 32]")
    assert given.operator == "aten::gelu"
    assert given.birth_s <= products[1].start_s <= given.death_s


def test_operators_of_a_backward_have_the_node_of_their_forward(tmp_path):
    rank = recorded(
        tmp_path, nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(64, 16)
    )
    first = {}
    for row in rank.operators:
        if row.phase in ("forward", "outside") and row.node is not None:
            first.setdefault(row.node, row.name)
    pairs = {
        (row.name, first[row.node]) for row in rank.operators if row.phase == "backward" and row.node in first
    }
    assert ("aten::mm", "aten::addmm") in pairs
    assert ("aten::tanh_backward", "aten::tanh") in pairs
    assert not any(name == "aten::tanh_backward" and of != "aten::tanh" for name, of in pairs)


def test_what_autograd_keeps_has_the_node_that_keeps_it(tmp_path):
    rank = recorded(
        tmp_path, nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(64, 16)
    )
    of_tanh = {row.node for row in rank.operators if row.name == "aten::tanh_backward"}
    assert len(of_tanh) == 1
    kept = [row for row in rank.saved if row.node in of_tanh]
    assert [row.operator for row in kept] == ["aten::tanh"]
