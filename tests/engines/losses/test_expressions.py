"""Values are those of when the script called an operator, whatever it has done by the time that they are made."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memadvisor.engines.losses.chunked_layer import chunked_linear
from tests.engines.losses.test_chunked_tensor import (
    BATCH,
    CLASSES,
    DOUBLE,
    LENGTH,
    ROWS,
    SEEN,
    both,
    in_chunks,
    parts,
    results,
    shifted,
)


def biased(scores, bias):
    added = scores + bias
    bias.copy_(torch.randn_like(bias))
    return added


@pytest.mark.parametrize("shape", [(), (CLASSES,), (BATCH, LENGTH, 1), (LENGTH, 1)], ids=str)
def test_what_is_added_is_what_it_was_then_whatever_the_script_writes_into_it_later(shape):
    def loss(scores):
        return biased(scores, torch.ones(shape, dtype=scores.dtype)).tanh().sum()

    torch.testing.assert_close(results(loss, in_chunks), results(loss, F.linear), rtol=1e-10, atol=1e-10)


def test_what_is_as_large_as_the_output_and_changed_before_it_was_used_is_an_error_and_no_other_number():
    ours, _ = both()
    with pytest.raises(RuntimeError, match="--chunked-loss"):
        biased(ours, torch.ones(BATCH, LENGTH, CLASSES, **DOUBLE)).argmax(-1)


def test_changes_are_not_forgotten_in_an_update():
    hidden, weight, bias = (each.detach() for each in parts())
    products = []
    ours = chunked_linear(hidden, weight, bias, ROWS, lambda operator: None, products.append, lambda _: None)
    weight.add_(1)
    products[0].keep_weights({weight.data_ptr()}, {})
    with pytest.raises(RuntimeError, match="--chunked-loss"):
        ours.argmax(-1)


def test_values_are_of_the_dtype_that_the_layer_was_called_in_wherever_they_are_made():
    """A layer that the script keeps out of autocast, whose scores are read inside of it."""
    hidden, weight, bias = parts(torch.float32)
    ours, theirs = in_chunks(hidden, weight, bias), F.linear(hidden, weight, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, numbers = ours.gather(-1, SEEN.unsqueeze(-1)), ours.detach().numpy()
    torch.testing.assert_close(found, theirs.gather(-1, SEEN.unsqueeze(-1)))
    torch.testing.assert_close(torch.from_numpy(numbers), theirs.detach())


def test_rows_are_told_apart_on_the_host_whatever_the_scripts_default_device_is():
    told: list[str] = []
    with torch.device("meta"):
        hidden, weight, bias = (each.detach().requires_grad_() for each in parts_on_cpu())
        value = shifted(in_chunks(hidden, weight, bias, told))
        value.backward()
    its = [each.detach().requires_grad_() for each in parts_on_cpu()]
    shifted(F.linear(*its)).backward()
    torch.testing.assert_close([hidden.grad, weight.grad, bias.grad], [each.grad for each in its])
    assert told == []


def parts_on_cpu():
    with torch.device("cpu"):
        return parts()


def test_hooks_of_saved_tensors_find_values():
    def loss(scores):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            return scores.tanh().sum()

    torch.testing.assert_close(results(loss, in_chunks), results(loss, F.linear), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("change", [lambda s: s, lambda s: s.transpose(0, 1) * 1, lambda s: s.mT.clone()])
def test_whole_values_have_the_strides_that_were_told(change):
    ours, theirs = (change(scores) for scores in both())
    assert ours.made("").stride() == ours.stride() == theirs.stride()


def test_counts_and_sums_of_16_bits_are_no_less_exact_than_torchs():
    hidden, weight = torch.ones(70, 4), torch.full((1000, 4), 16.0)
    scores = chunked_linear(
        hidden.half(), weight.half(), None, 7, lambda operator: None, lambda _: None, lambda _: None
    )
    assert scores.mean() == 64  # their sum, 64 * 70,000, is beyond 65,504
    assert scores.sum() == torch.inf
    target = torch.zeros(70, dtype=torch.long)
    ours = F.nll_loss(scores * 20, target), F.nll_loss(scores * 20, target, reduction="sum")
    assert ours == (-1280, -torch.inf)
    # Float32 cannot tell 2**24 from 2**24 + 1.
    many = chunked_linear(
        torch.ones(4099, 1),
        torch.ones(4099, 1),
        None,
        512,
        lambda operator: None,
        lambda _: None,
        lambda _: None,
    )
    assert int((many > 0).sum()) == 4099**2
