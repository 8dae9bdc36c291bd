"""FLOPs of a step, against numbers worked out by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor


def flops(tmp_path, model, make_loss):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            make_loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    operators = prof.run.ranks[0].operators
    return sum(row.model_flops for row in operators), sum(row.executed_flops for row in operators)


def test_a_linear_layer_needs_six_flops_a_weight_and_row_less_the_unneeded_input_gradient(tmp_path):
    """Forward 2·rows·in·out, weight gradient as much; nobody asks for the input's gradient."""
    needed, executed = flops(tmp_path, nn.Linear(32, 48, bias=False), lambda m: m(torch.randn(8, 32)).sum())

    assert needed == executed == 2 * (2 * 8 * 32 * 48)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_needs_two_products_forward_and_four_backward(tmp_path, causal):
    """Per head and pair 2·d FLOPs a product; fused attention runs QK' a second time in its backward."""
    batch, heads, length, dim = 2, 3, 16, 8

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Parameter(torch.randn(3, batch, heads, length, dim))

        def forward(self, scale):
            q, k, v = self.qkv.unbind(0)
            return F.scaled_dot_product_attention(q * scale, k, v, is_causal=causal)

    needed, executed = flops(tmp_path, Attention(), lambda m: m(torch.ones(1)).sum())

    pairs = batch * heads * (length * (length + 1) // 2 if causal else length * length)
    assert needed == (2 + 4) * 2 * pairs * dim
    assert executed == (2 + 5) * 2 * pairs * dim


def test_an_lstm_needs_its_two_weight_products_and_twice_as_much_backward(tmp_path):
    """Less the gradient of the first hidden state, which is a constant; oneDNN computes it all the same."""
    length, batch, inputs, hidden = 10, 4, 16, 24

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(inputs, hidden, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    def loss(model):
        return model(torch.randn(batch, length, inputs, requires_grad=True)).sum()

    needed, executed = flops(tmp_path, Recurrent(), loss)

    forward = 2 * batch * length * 4 * hidden * (inputs + hidden)
    assert needed == 3 * forward - 2 * batch * 4 * hidden * hidden
    assert executed == 3 * forward


def test_recomputation_is_executed_but_not_needed(tmp_path):
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(32, 32, bias=False)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    def loss(model):
        return model(torch.randn(8, 32, requires_grad=True)).sum()

    needed, executed = flops(tmp_path, Recomputed(), loss)

    product = 2 * 8 * 32 * 32
    # The recomputation stops as soon as it has what was saved: a linear layer saves its input alone.
    assert needed == 3 * product
    assert needed <= executed <= 4 * product


def test_an_operator_that_runs_others_unseen_works_as_ever_and_is_named(tmp_path):
    """torch refuses flex_attention under a dispatch mode that does not say it bears with it."""
    from torch.nn.attention.flex_attention import flex_attention

    class Flexible(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                y = flex_attention(x, x, x)  # on CPU it has no backward
            return self.scale(y)

    model = Flexible()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            model(torch.ones(1, 2, 16, 8)).sum().backward()
            optimizer.step()
    recorded = prof.run.ranks[0]

    assert len(recorded.steps) == 4
    assert recorded.traced_step is not None
    assert any("flex_attention" in note.text for note in recorded.notes)
