"""What the page says to do next, of trainings whose answer is known."""

import torch

import memadvisor
from memadvisor.analyzers.analysis import analyze
from memadvisor.report.page import render


class Chunked(torch.autograd.Function):
    """As a fused loss: its backward works in a buffer far larger than all that is kept for it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        buffer = torch.empty(64, 4096)
        buffer.copy_(x.mean())
        return grad.expand_as(x) * 1.0 + buffer.mean() * 0.0


def test_where_a_temporary_is_most_of_the_peak_it_is_named_first(tmp_path):
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            optimizer.zero_grad()
            Chunked.apply(model(torch.ones(64, 16))).backward()
            optimizer.step()

    page = render(analyze(prof.run))

    advice = page[page.index("What to do next") :]
    first = advice[advice.index("<li>") : advice.index("</li>")]
    assert first.startswith("<li>Temporaries are ")  # how much is as what tests before left alive
    assert "the largest takes 1.00 MiB (float32 [64, 4096], made by empty, outside any module)" in first
