"""What a forward sets on its modules is, for a second run, as it was before the first, and afterwards as it is."""

import torch

from tests.engines.trainings import applied, make_plan


class Cached(torch.nn.Module):
    """Keeps its result for later calls until the script clears it, as pykeen's R-GCN does."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.result = None

    def forward(self, x):
        if self.result is None:
            self.result = torch.tanh(self.linear(x)).exp()
        return self.result


class Counting(torch.nn.Module):
    """What it does depends on how often it was called; the first call makes the count."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.runs = []

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        self.runs.append(self.count)
        return torch.tanh(self.linear(x) * self.count)


def train(kind):
    """Its first step finds one result that is there already."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(9, 9), kind(), kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    model[1].result = torch.ones(5, 9)
    for _ in range(4):
        loss = (model(torch.randn(5, 9)) * model[1](torch.randn(5, 9))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for unit in model[1:]:
            unit.result = None
        losses.append(float(loss.detach()))
    return losses, model


def test_a_unit_that_keeps_its_result_for_the_next_call_is_recomputed():
    """The second run returned what was kept, saved nothing, and ended the training."""
    plain, _ = train(Cached)
    with applied(make_plan(1, policy="every-layer")):
        ours, _ = train(Cached)
    assert ours == plain


def test_a_count_of_calls_goes_on_as_without_the_plan():
    plain, plain_model = train(Counting)
    with applied(make_plan(1, policy="every-layer")):
        ours, model = train(Counting)
    assert ours == plain
    assert model[2].count == plain_model[2].count == 4
    assert sorted(model[2].runs) == [1, 1, 2, 2, 3, 3, 4, 4]  # each was run again with its own count
