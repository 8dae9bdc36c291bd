"""When autograd adds to a parameter's gradient, which is later than its operator makes what is added."""

import torch
from torch import nn

import memadvisor

BATCH, DIM, WIDE = 8, 16, 24


def traced(directory, num_micro_batches=1, hook=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, WIDE), nn.GELU(), nn.Linear(WIDE, DIM))
    if hook is not None:
        model[2].weight.register_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with memadvisor.profile(directory, trace_step=1) as prof:
        for _ in range(2):
            for _ in range(num_micro_batches):
                model(torch.randn(BATCH, DIM)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run.ranks[0]


def born_in_backward(rank, category):
    return [row for row in rank.storages if row.category == category and row.phase == "backward"]


def test_a_gradient_is_accumulated_when_its_node_has_let_go_of_what_it_was_given(tmp_path):
    """That of a product's weight; of what follows nothing is there by then."""
    rank = traced(tmp_path / "run")
    gradients = born_in_backward(rank, "gradient")
    assert len(gradients) == 4 == sum(row.accumulated_s is not None for row in rank.storages)

    (weight,) = [row for row in gradients if row.shape == f"[{DIM}, {WIDE}]"]
    (given,) = [
        row
        for row in born_in_backward(rank, "temporary")
        if row.shape == f"[{BATCH}, {DIM}]" and row.birth_s < weight.birth_s < row.death_s
    ]
    (after,) = [row for row in born_in_backward(rank, "temporary") if row.operator == "aten::gelu_backward"]
    assert given.death_s < weight.accumulated_s < after.birth_s


def test_what_is_added_to_an_older_gradient_is_seen_too(tmp_path):
    """The four of the second micro-batch go when they have been added."""
    rank = traced(tmp_path / "run", num_micro_batches=2)
    added = [row for row in born_in_backward(rank, "temporary") if row.accumulated_s is not None]

    assert len(added) == 4 == len(born_in_backward(rank, "gradient"))
    assert all(row.micro_batch == 1 and row.birth_s < row.accumulated_s < row.death_s for row in added)


def test_what_a_hook_of_the_scripts_makes_of_a_gradient_is_what_is_accumulated(tmp_path):
    rank = traced(tmp_path / "run", hook=lambda gradient: gradient * 2)
    alike = [row for row in rank.storages if row.shape == f"[{DIM}, {WIDE}]" and row.phase == "backward"]

    assert [row.accumulated_s is not None for row in sorted(alike, key=lambda row: row.birth_s)] == [
        False,
        True,
    ]
