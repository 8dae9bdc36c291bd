"""What a second run is called with."""

import pytest
import torch

from tests.engines.trainings import applied, make_plan


class Attending(torch.nn.Module):
    """Attention projects its query, key and value at once where they are one tensor, so it saves fewer of them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(9, 3, batch_first=True) for _ in range(4)
        )

    def forward(self, x):
        x = x[None]
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x[0]


def losses():
    torch.manual_seed(2)
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(4):
        loss = model(torch.randn(5, 9)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("policy", ["every-layer", "sqrt"])
def test_one_tensor_in_several_places_is_one_in_the_second_run(policy):
    plain = losses()
    with applied(make_plan(1, policy=policy)):
        assert losses() == plain
