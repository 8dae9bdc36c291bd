"""Units that return several tensors, one made of another: their backwards begin with the one that was made last."""

import pytest
import torch
from torch import nn

from memadvisor.analyzers.pieces import cut_step
from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import BATCH, LENGTH, VOCABULARY, WIDTH, Gpt, recorded


def feed_forward():
    return nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )


class TwoStreams(Gpt):
    """The first stream's gradient is there only when the second's half of a block has had its backward."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = feed_forward(), feed_forward()

        def forward(self, a, b):
            a = a + self.first(b)
            return a, b + self.second(a)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def loss(self):
        a = b = self.tokens(torch.randint(VOCABULARY, (BATCH, LENGTH)))
        for block in self.blocks:
            a, b = block(a, b)
        return self.head(torch.cat([a, b], -1)).square().mean()


class Unused(TwoStreams):
    """What blocks have made last, the loss does not need; what they hand on was made before them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = feed_forward()

        def forward(self, a, b):
            a = a + self.first(b)
            return {"handed on": b, "made": [a, a.exp()]}

    def loss(self):
        a = b = self.tokens(torch.randint(VOCABULARY, (BATCH, LENGTH)))
        for block in self.blocks:
            b, (a, _) = block(b, a).values()
        return self.head(torch.cat([a, b], -1)).square().mean()


@pytest.mark.parametrize("kind", [TwoStreams, Unused])
def test_what_a_block_keeps_is_asked_for_in_its_own_backward(kind):
    run, _ = recorded(kind, 2, bf16=False)
    rank = run.ranks[0]
    pieces = cut_step(rank.spans, rank.traced_step)
    backwards = [p for p in pieces if p.phase == "backward" and (p.unit or "").startswith("blocks")]
    asked = [row for row in rank.saved if row.unit.startswith("blocks") and row.unpacked_s is not None]

    assert len(backwards) == 2 * 4
    assert len(asked) >= 10 * len(backwards)
    for row in asked:
        (own,) = [piece for piece in backwards if piece.start_s <= row.unpacked_s <= piece.end_s]
        assert own.unit == row.unit


@pytest.mark.parametrize(
    ("kind", "chosen"), [(TwoStreams, (1, 2)), (TwoStreams, (0, 1, 2, 3)), (Unused, (0, 2, 3))]
)
def test_blocks_run_again_where_the_last_of_their_outputs_has_its_gradient(kind, chosen):
    predicted, measured, losses = predicted_and_measured(kind, 1, chosen, bf16=False)

    assert losses[0] == losses[1]
    assert measured == predicted
