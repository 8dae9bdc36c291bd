"""Float32 copies that an optimizer updates in place of a bf16 model's parameters are its state, in theory too."""

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.capture.masters import masters


class OneByOne:
    """apex's, Megatron's."""

    def __init__(self, model):
        self.narrow = list(model.parameters())
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.narrow]

    def take_gradients(self):
        for master, parameter in zip(self.masters, self.narrow, strict=True):
            master.grad = parameter.grad.float()

    def give_values(self):
        for master, parameter in zip(self.masters, self.narrow, strict=True):
            parameter.data.copy_(master.data)


class Flat(OneByOne):
    """fairseq's."""

    def __init__(self, model):
        super().__init__(model)
        self.masters = [nn.Parameter(torch.cat([each.detach().float().flatten() for each in self.narrow]))]

    def take_gradients(self):
        self.masters[0].grad = torch.cat([each.grad.float().flatten() for each in self.narrow])

    def give_values(self):
        parts = self.masters[0].data.split([each.numel() for each in self.narrow])
        for part, parameter in zip(parts, self.narrow, strict=True):
            parameter.data.copy_(part.view_as(parameter))


@pytest.mark.parametrize("kind", [OneByOne, Flat])
def test_masters_are_optimizer_state_and_theory_has_them_and_their_moments(kind, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).bfloat16()
    copies = kind(model)
    optimizer = torch.optim.Adam(copies.masters)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            model(torch.randn(8, 64, dtype=torch.bfloat16)).square().mean().backward()
            copies.take_gradients()
            optimizer.step()
            optimizer.zero_grad()
            copies.give_values()
            for parameter in model.parameters():
                parameter.grad = None
    num = sum(parameter.numel() for parameter in model.parameters())
    rank = prof.analysis.ranks[0]
    states = {each.component: each for each in rank.model_states.components if each.kind == "optimizer_state"}
    categories = rank.peak.by_category_bytes

    assert {name for name in states if name != "step"} == {"master", "exp_avg", "exp_avg_sq"}
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert states[name].expected_bytes == states[name].recorded_bytes == 4 * num
    assert categories["optimizer_state"] == 12 * num + 4 * len(copies.masters)
    assert rank.model_states.gradient_bytes == 2 * num
    # What earlier tests have left in this process, and nothing of the step.
    assert {row.unexplained_bytes for row in prof.run.ranks[0].residuals} <= {rank.peak.unexplained_bytes}
    assert categories.get("other", 0) < num


def test_what_is_trained_beside_a_model_is_no_master_of_its():
    model = nn.Linear(4, 4).bfloat16()
    temperature = torch.zeros(1, requires_grad=True)
    own = list(model.parameters())

    assert masters(own, [torch.optim.Adam([temperature])]) == []
    assert masters(own, [torch.optim.SGD(own, 0.1), torch.optim.Adam([torch.zeros(20)])]) == []


def test_masters_of_the_narrow_part_alone_stand_beside_the_rest():
    model = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    copies = [nn.Parameter(parameter.detach().float()) for parameter in model[0].parameters()]
    found = masters(list(model.parameters()), [torch.optim.Adam([*copies, *model[1].parameters()])])

    assert [id(each) for each in found] == [id(each) for each in copies]
