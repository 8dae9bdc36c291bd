"""Several units may end in the same autograd node: the backward from there is that of the one which made it."""

import torch
from torch import nn

import memadvisor


class Skipped(nn.Module):
    """A block that gives back what it is given, as stochastic depth leaves one out."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(16, 16)

    def forward(self, x):
        return x


def backwards_of(model, directory, steps=4):
    """The spans of units' backwards in the last step, in order of time; and storages of the traced step's."""
    model = model()
    optimizer = torch.optim.SGD(list(model.parameters()), 0.1)
    with memadvisor.profile(directory) as prof:
        for _ in range(steps):
            model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]
    spans = [span for span in rank.spans if span.kind == "unit_backward" and span.step == steps - 1]
    made = {row.module for row in rank.storages if row.phase == "backward" and row.category == "gradient"}
    return sorted(spans, key=lambda span: span.start_s), made


def block():
    return nn.Sequential(nn.Linear(16, 16), nn.GELU())


def test_the_last_block_has_its_backward_where_the_model_returns_what_it_does(tmp_path):
    """The model's own had all of it: 1.8 us were the block's, and the peak was in the backward of the model itself."""
    spans, made = backwards_of(lambda: nn.Sequential(block(), block(), block()), tmp_path / "run")

    assert [span.unit for span in spans] == ["", "2", "1", "0"]
    model, last = spans[0], spans[1]
    assert model.end_s == last.start_s < last.end_s == spans[2].start_s
    assert model.end_s - model.start_s < last.end_s - last.start_s
    assert made == {"0.0", "1.0", "2.0"}


def test_a_block_that_gives_back_what_it_is_given_takes_nothing_from_the_one_before(tmp_path):
    blocks = lambda: nn.Sequential(block(), Skipped(), Skipped(), block())  # noqa: E731
    spans, _ = backwards_of(blocks, tmp_path / "run")

    assert [span.unit for span in spans] == ["", "3", "2", "1", "0"]
    second, first, made = spans[2:]
    assert second.end_s == first.start_s
    assert first.end_s == made.start_s
    assert second.end_s - second.start_s + first.end_s - first.start_s < made.end_s - made.start_s
