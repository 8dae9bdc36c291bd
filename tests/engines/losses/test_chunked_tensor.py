"""A layer's output in chunks: the numbers are those of the whole output, and nothing as large as that is ever there."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.engines.losses.chunked_layer import chunked_linear
from memadvisor.engines.losses.chunked_tensor import ChunkedTensor

BATCH, LENGTH, FEATURES, CLASSES, ROWS = 3, 17, 8, 41, 10
SCORES = BATCH * LENGTH * CLASSES
DOUBLE = {"dtype": torch.float64}


def targets():
    torch.manual_seed(2)
    found = torch.randint(CLASSES, (BATCH, LENGTH))
    found[0, 3:6] = -100
    return found


T = targets()
SEEN = T.clamp(min=0)


def flat(scores, target=T):
    return scores.reshape(-1, CLASSES), target.reshape(-1)


def shifted(scores):
    return F.cross_entropy(scores[:, :-1].reshape(-1, CLASSES), T[:, 1:].reshape(-1))


def logp(scores):
    return F.log_softmax(scores, -1).gather(-1, SEEN.unsqueeze(-1)).squeeze(-1)


# What scripts write, and what of it takes no whole scores.
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda s: F.cross_entropy(*flat(s)),
    "sum": lambda s: F.cross_entropy(*flat(s), reduction="sum"),
    "none": lambda s: (
        F.cross_entropy(*flat(s), reduction="none") * torch.linspace(0, 1, BATCH * LENGTH)
    ).sum(),
    "smooth": lambda s: F.cross_entropy(*flat(s), label_smoothing=0.1),
    "weights": lambda s: F.cross_entropy(
        *flat(s), weight=torch.linspace(0.1, 1, CLASSES, dtype=s.dtype), label_smoothing=0.1
    ),
    "module": lambda s: torch.nn.CrossEntropyLoss()(*flat(s)),
    "float": lambda s: F.cross_entropy(*flat(s.float())),
    "next token": lambda s: F.cross_entropy(
        s[..., :-1, :].contiguous().view(-1, CLASSES), T[..., 1:].contiguous().view(-1)
    ),
    "sliced": shifted,
    "sliced twice": lambda s: F.cross_entropy(*flat(s[:, :-1][:, -9:], T[:, 1:][:, -9:])),
    "classes second": lambda s: F.cross_entropy(s.transpose(1, 2), T),
    "classes second, none": lambda s: (
        F.cross_entropy(s.permute(0, 2, 1), T, reduction="none") * torch.linspace(0, 1, LENGTH)
    ).mean(),
    "probabilities": lambda s: F.cross_entropy(flat(s)[0], F.one_hot(SEEN.view(-1), CLASSES).to(s.dtype)),
    "capped": lambda s: F.cross_entropy(*flat(torch.tanh(s / 5) * 5)),
    "in place": lambda s: F.cross_entropy(*flat(s.div_(2.0))),
    "z-loss": lambda s: F.cross_entropy(*flat(s)) + 1e-2 * s.logsumexp(-1).square().mean(),
    "z-loss of all": lambda s: shifted(s) + 1e-2 * s.logsumexp(-1).square().mean(),
    "log-probabilities": lambda s: -(logp(s) * (T >= 0)).sum(),
    "row by row": lambda s: (torch.stack([torch.logsumexp(row, -1) for row in s]) * (T >= 0)).mean(),
    "nll": lambda s: F.nll_loss(F.log_softmax(s, -1).view(-1, CLASSES), T.view(-1)),
    "divergence": lambda s: F.kl_div(
        F.log_softmax(s, -1),
        torch.full((BATCH, LENGTH, CLASSES), 1 / CLASSES, dtype=s.dtype),
        reduction="batchmean",
    ),
    "entropy": lambda s: -(F.softmax(s, -1) * F.log_softmax(s, -1)).sum(-1).mean(),
    "sum of all": lambda s: s.tanh().sum(),
    "log-probabilities, written into": lambda s: (
        -(s.log_softmax(-1).gather(-1, SEEN.unsqueeze(-1)).masked_fill_(T.unsqueeze(-1) < 0, 0.0).sum())
    ),
}
# Their targets are as large, or the gradient that smoothing gives classes with weights is, which torch makes of these alone.
AS_LARGE = ("divergence", "probabilities", "weights")
WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "masked": lambda s: F.cross_entropy(s[T >= 0], T[T >= 0]),
    "squares": lambda s: F.mse_loss(s, torch.ones(BATCH, LENGTH, CLASSES, dtype=s.dtype)),
    "product": lambda s: (s @ torch.ones(CLASSES, 3, dtype=s.dtype)).square().sum(),
    "one element": lambda s: F.cross_entropy(*flat(s)) * s[0, 0, 0],
    "repeated": lambda s: s.unsqueeze(0).expand(2, -1, -1, -1).square().sum(),
    "classes cut": lambda s: s[..., :5].square().sum(),
    "nll, classes second": lambda s: F.nll_loss(s.log_softmax(-1).transpose(1, 2), T),
    "written": lambda s: F.cross_entropy(*flat(s.index_fill(-1, torch.tensor([1]), -1e4))),
}


class Largest(TorchDispatchMode):
    """The most elements of any tensor in memory that an operator returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, ChunkedTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(value, torch.Tensor) and value.device.type != "meta" and 0 not in value.stride():
                self.elements = max(self.elements, value.numel())
        return out


def parts(dtype=torch.float64):
    torch.manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, FEATURES, dtype=dtype, requires_grad=True)
    weight = (0.3 * torch.randn(CLASSES, FEATURES, dtype=dtype)).requires_grad_()
    return hidden, weight, (0.1 * torch.randn(CLASSES, dtype=dtype)).requires_grad_()


def in_chunks(hidden, weight, bias, told=None, rows=ROWS):
    return chunked_linear(
        hidden,
        weight,
        bias,
        rows,
        (lambda operator: None) if told is None else told.append,
        lambda _: None,
        lambda _: None,
    )


def results(loss, layer, dtype=torch.float64):
    hidden, weight, bias = parts(dtype)
    value = loss(layer(hidden * 1, weight, bias))
    value.backward()
    return value.detach(), hidden.grad, weight.grad, bias.grad


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_and_its_gradients_are_those_of_the_whole_output_which_is_never_there(kind):
    told: list[str] = []
    with Largest() as largest:
        ours = results(LOSSES[kind], lambda *its: in_chunks(*its, told))
    tolerance = 1e-5 if kind == "float" else 1e-10
    torch.testing.assert_close(ours, results(LOSSES[kind], F.linear), rtol=tolerance, atol=tolerance)
    assert told == []
    if kind not in AS_LARGE:
        assert largest.elements < SCORES / 2


@pytest.mark.parametrize("kind", WHOLE)
def test_what_needs_the_whole_output_gets_it_and_is_told_of(kind):
    told: list[str] = []
    ours = results(WHOLE[kind], lambda *its: in_chunks(*its, told))
    torch.testing.assert_close(ours, results(WHOLE[kind], F.linear), rtol=1e-10, atol=1e-10)
    assert told


@pytest.mark.parametrize("rows", [1, 7, 10_000])
def test_chunks_may_have_any_number_of_rows(rows):
    ours = results(LOSSES["sliced"], lambda *its: in_chunks(*its, rows=rows))
    torch.testing.assert_close(ours, results(LOSSES["sliced"], F.linear), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_weights_are_no_further_from_the_true_ones_than_torchs(dtype):
    """Their chunks are summed in float32."""

    def loss(scores):
        return F.cross_entropy(*flat(scores.float()))

    rounded = [each.detach().to(dtype).double().requires_grad_() for each in parts()]
    loss(F.linear(*rounded)).backward()
    errors = [
        (results(loss, layer, dtype)[2].double() - rounded[1].grad).norm() for layer in (in_chunks, F.linear)
    ]
    assert errors[0] <= 1.5 * errors[1]


def test_autocast_casts_layer_and_loss_as_it_does_without():
    def loss(scores):
        assert scores.dtype == torch.bfloat16
        return F.cross_entropy(*flat(scores))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (results(loss, layer, torch.float32) for layer in (in_chunks, F.linear))
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)


def test_frozen_weights_get_no_gradient_and_a_frozen_input_none():
    for trainable in range(3):
        its = [each.detach().requires_grad_(place == trainable) for place, each in enumerate(parts())]
        theirs = [each.detach().requires_grad_(place == trainable) for place, each in enumerate(parts())]
        shifted(in_chunks(*its)).backward()
        shifted(F.linear(*theirs)).backward()
        assert [each.grad is None for each in its] == [place != trainable for place in range(3)]
        torch.testing.assert_close(its[trainable].grad, theirs[trainable].grad, rtol=1e-10, atol=1e-10)


def test_gradients_of_gradients():
    def penalty(layer):
        hidden, weight, bias = parts()
        value = shifted(layer(hidden, weight, bias))
        (of_hidden,) = torch.autograd.grad(value, hidden, create_graph=True)
        (value + of_hidden.square().sum()).backward()
        return hidden.grad, weight.grad, bias.grad

    torch.testing.assert_close(penalty(in_chunks), penalty(F.linear), rtol=1e-9, atol=1e-9)


def test_a_second_backward_through_a_retained_graph():
    hidden, weight, bias = parts()
    value = shifted(in_chunks(hidden, weight, bias))
    value.backward(retain_graph=True)
    first = hidden.grad.clone()
    value.backward()
    torch.testing.assert_close(hidden.grad, 2 * first)


# ---- values --------------------------------------------------------------------------------------


def both():
    its = [each.detach() for each in parts()]
    return in_chunks(*its), F.linear(*its)


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.argmax(-1),
        lambda s: s.max(-1),
        lambda s: s.topk(3, dim=-1),
        lambda s: s.softmax(-1).amax(dim=-1, keepdim=True),
        lambda s: s.sum(dim=(-1,)),
        lambda s: s.isnan().any(),
        lambda s: s.max(),
        lambda s: s.sum(1),
        lambda s: s[:, -1].argsort(),
        lambda s: s.cpu().numpy().copy(),
        lambda s: s.tolist(),
        lambda s: float(s[1, 2, 3]),
        lambda s: s.view(-1).unfold(0, 5, 5),
        lambda s: torch.cat([s, s], 1),
        lambda s: torch.cat([s[:1], s[1:]]),
        lambda s: s.t() if s.dim() == 2 else s.mT,
        lambda s: copy.deepcopy(s),
        lambda s: s.new_zeros(s.shape[-1]),
        lambda s: torch.zeros_like(s),
        lambda s: s.to(torch.float32),
        lambda s: [each.clone() for each in s.split(2)],
        lambda s: s.flip(0),
    ],
)
def test_what_is_read_is_what_the_whole_output_has(read):
    ours, theirs = both()
    torch.testing.assert_close(read(ours), read(theirs)) if not isinstance(read(theirs), tuple) or isinstance(
        read(theirs)[0], torch.Tensor
    ) else None
    if isinstance(read(theirs), tuple) and not isinstance(read(theirs)[0], torch.Tensor):
        assert read(ours) == read(theirs)


def test_a_saved_one_is_an_ordinary_tensor():
    ours, theirs = both()
    file = io.BytesIO()
    torch.save({"scores": ours}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["scores"]
    assert type(loaded) is torch.Tensor
    torch.testing.assert_close(loaded, theirs)


def test_whoever_writes_into_a_view_writes_into_the_tensor():
    ours, theirs = both()
    for scores in (ours, theirs):
        part = scores[1]
        scores[0, 0] = 7.0
        part[2, 3] = -1.0
        part.mul_(2)
        scores.add_(1)
        scores.masked_fill_(scores > 3, 0.5)
    torch.testing.assert_close(ours + 0, theirs)
    torch.testing.assert_close(ours[1] + 0, theirs[1])


def test_what_was_changed_in_place_before_it_was_used_is_an_error_and_no_other_number():
    hidden, weight, bias = (each.detach() for each in parts())
    ours = in_chunks(hidden, weight, bias)
    weight.add_(1)
    with pytest.raises(RuntimeError, match="--chunked-loss"):
        ours.argmax(-1)


def test_what_scores_are_put_together_with_is_as_it_was_then_or_an_error():
    ours, theirs = both()
    row, column = torch.ones(CLASSES, dtype=torch.float64), torch.ones(BATCH, LENGTH, 1, dtype=torch.float64)
    made, wanted = ours * row + column, theirs * row + column
    row.zero_(), column.zero_()
    torch.testing.assert_close(made.amax(-1), wanted.amax(-1))
    large = torch.ones_like(theirs)
    made = ours + large
    large.zero_()
    with pytest.raises(RuntimeError, match="--chunked-loss"):
        made.amax(-1)


def test_dropout_of_scores_is_drawn_once():
    ours, theirs = both()
    found = []
    for scores in (ours, theirs):
        torch.manual_seed(0)
        dropped = F.dropout(scores, 0.5)
        found += [dropped.sum(-1), dropped.amax(-1)]
    torch.testing.assert_close(found[:2], found[2:])


MOVES = [
    lambda s: s[:, 1:],
    lambda s: s[:, :-1],
    lambda s: s[..., ::2, :],
    lambda s: s[1:],
    lambda s: s.transpose(0, 1),
    lambda s: s.contiguous(),
    lambda s: s.reshape(1, -1, s.shape[-1]),
    lambda s: s * 2,
    lambda s: s.float().double(),
    lambda s: s.tanh(),
    lambda s: s + torch.ones(s.shape[-1], dtype=s.dtype),
    lambda s: s * torch.arange(1.0, s.shape[1] + 1, dtype=s.dtype)[:, None],
    lambda s: s - s.amax(-1, keepdim=True),
    lambda s: s.log_softmax(-1),
    lambda s: torch.stack([each.clone() for each in s]),
    lambda s: s.detach() + s,
    lambda s: torch.where(s > 0, s, 0.1 * s),
    lambda s: s.clone().mul_(0.5),
    lambda s: s.transpose(1, 2).transpose(1, 2),
    lambda s: torch.cat([s[:1], s[1:]]),
]
ENDS = [
    lambda s: s.logsumexp(-1).square().sum(),
    lambda s: s.square().mean(),
    lambda s: F.cross_entropy(s.reshape(-1, CLASSES), torch.arange(s.shape[0] * s.shape[1]) % CLASSES),
    lambda s: s.gather(-1, torch.zeros(*s.shape[:2], 2, dtype=torch.long)).sum(),
    lambda s: F.cross_entropy(s.transpose(1, 2), torch.zeros(s.shape[:2], dtype=torch.long)),
]


@settings(max_examples=150, deadline=None)
@given(
    moves=st.lists(st.sampled_from(range(len(MOVES))), max_size=5),
    ends=st.lists(st.sampled_from(range(len(ENDS))), min_size=1, max_size=2),
    rows=st.integers(1, 30),
)
def test_any_chain_of_operators_gives_the_numbers_and_gradients_of_the_whole_output(moves, ends, rows):
    def loss(scores):
        total = 0.0
        for place in moves:
            if scores.numel() == 0 or scores.shape[1] < 2:
                break
            scores = MOVES[place](scores)
        for place in ends:
            total = total + ENDS[place](scores)
        return total

    def outcome(layer):
        hidden, weight, bias = parts()
        try:
            value = loss(layer(hidden * 1, weight, bias))
            value.backward()
        except RuntimeError as error:  # a view that these strides do not allow
            return type(error)
        return value.detach(), hidden.grad, weight.grad, bias.grad

    ours, theirs = outcome(lambda *its: in_chunks(*its, rows=rows)), outcome(F.linear)
    if isinstance(theirs, type):
        assert ours is theirs
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)
