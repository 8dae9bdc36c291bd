"""Which module a script's model is."""

import torch
from torch import nn

import memadvisor


class Flow(nn.Module):
    """Called by a method that is not its forward."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def log_prob(self, x):
        for step in self.steps:
            x = step(x)
        return -x.square().sum()


def test_a_model_is_no_list_of_its_layers(tmp_path):
    model = Flow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            (-model.log_prob(torch.randn(4, 8))).backward()
            optimizer.step()
    assert [unit.name for unit in prof.run.ranks[0].units] == ["steps.0", "steps.1", "steps.2"]
