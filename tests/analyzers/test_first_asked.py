"""Where units' backwards begin with what asks for nothing that the forward has kept: predicted, applied and measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import BATCH, LENGTH, WIDTH

COPIES = 8


class Averaging(nn.Module):
    """Ends by the mean of its heads, as graph attention does: the whole gradient is there when it runs again."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(WIDTH, COPIES * WIDTH)

    def forward(self, x):
        heads = self.heads(x).view(BATCH, LENGTH, COPIES, WIDTH).transpose(1, 2)
        scores = heads @ heads.transpose(2, 3)
        scaled = scores / WIDTH
        shifted = scaled + 1.0  # neither is kept, and both are there until it returns
        return (shifted.softmax(-1) @ heads).mean(1)


class Summing(nn.Module):
    """Ends by running sums over copies: their backward needs most, and is over before anything that was kept is there."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.down(F.gelu(self.up(x)))
        return y.repeat(1, 1, COPIES).cumsum(1).view(BATCH, LENGTH, COPIES, WIDTH).mean(2)


class Chain(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def loss(self):
        x = torch.randn(BATCH, LENGTH, WIDTH)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("chosen", [(2,), (0, 1, 2)])
@pytest.mark.parametrize("block", [Averaging, Summing])
def test_a_unit_runs_again_when_its_backward_first_asks_for_what_was_kept(block, chosen):
    predicted, measured, losses = predicted_and_measured(lambda: Chain(block), 1, chosen, bf16=False)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=1e-4)
