"""Bytes that operators must move, against tensors counted by hand. All numbers take 4 bytes but indices (8)."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.capture.operator_cost import arithmetic_of, counted_by, traffic_of


class Moved(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.by_operator = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.by_operator[func._opname] = traffic_of(counted_by(func), args, kwargs or {}, out)
        return out


def moved(work):
    with Moved() as seen:
        work()
    return seen.by_operator


A, B = torch.zeros(6, 4), torch.zeros(4, 5)
TABLE, ROWS = torch.zeros(1000, 4), torch.tensor([1, 2, 3])


@pytest.mark.parametrize(
    "work, operator, read, written",
    [
        (lambda: A @ B, "mm", 4 * (24 + 20), 4 * 30),
        (lambda: torch.mm(A, B, out=torch.zeros(6, 5)), "mm", 4 * (24 + 20), 4 * 30),
        (lambda: A + A, "add", 4 * 24, 4 * 24),
        (lambda: A + torch.zeros(4).expand(6, 4), "add", 4 * (24 + 4), 4 * 24),
        (lambda: A.clone().add_(A), "add_", 4 * 48, 4 * 24),
        (lambda: torch.empty(6, 4).copy_(A), "copy_", 4 * 24, 4 * 24),
        (lambda: torch.empty(6, 4).zero_(), "zero_", 0, 4 * 24),
        (lambda: torch.empty(6, 4), "empty", 0, 0),
        (lambda: A.t(), "t", 0, 0),
        (lambda: A[2:4].clone(), "clone", 4 * 8, 4 * 8),
        (lambda: torch.zeros(6).unfold(0, 3, 1).clone(), "clone", 4 * 6, 4 * 12),
        (lambda: F.embedding(ROWS, TABLE), "embedding", 3 * 8 + 4 * 12, 4 * 12),
        (lambda: TABLE.clone().index_add_(0, ROWS, torch.ones(3, 4)), "index_add_", 3 * 8 + 4 * 12, 3 * 8 + 4 * 12),
        (lambda: torch._foreach_add_([A.clone(), B.clone()], 1.0), "_foreach_add_", 4 * 44, 4 * 44),
        (lambda: torch.cat([A, A.clone()]), "cat", 4 * 48, 4 * 48),
    ],
)  # fmt: skip
def test_an_operator_moves_its_tensors_once(work, operator, read, written):
    assert moved(work)[operator] == (read, written)


def test_a_fused_optimizer_reads_four_and_writes_three_tensors_a_parameter():
    parameter = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones(100)
    optimizer.step()

    read, written = moved(optimizer.step)["_fused_adamw_"]

    assert (read, written) == (4 * (4 * 100 + 1), 4 * 3 * 100)  # one more is read: the step counter


def test_a_normalization_that_updates_statistics_writes_its_results_too():
    mean, variance = torch.zeros(4), torch.ones(4)
    image = torch.zeros(2, 4, 3, 3)

    read, written = moved(lambda: F.batch_norm(image, mean, variance, training=True))["native_batch_norm"]

    assert read == 4 * (72 + 8)
    assert written >= 4 * (72 + 8)


def test_an_operator_that_cannot_be_counted_is_named_and_raises_nothing():
    uncounted = set()

    unheard_of = torch.zeros(3, 7), torch.zeros(7, 11)
    counted = arithmetic_of(counted_by(torch.ops.aten.mm.default), unheard_of, {}, None, uncounted)

    assert counted.executed_flops == 0
    assert uncounted == {"aten::mm"}
