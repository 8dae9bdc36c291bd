"""The label layer's quick way finds what its general way finds, and its saved-tensor hooks call no operator."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.capture.collectives import CollectiveLog
from memadvisor.capture.label_log import LabelLog
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.operator_kinds import kinds
from memadvisor.capture.position import Position
from memadvisor.capture.saved_hooks import without_cycle


def fail(error):
    raise error


class BothWays(LabelMode):
    def __init__(self):
        super().__init__(LabelLog(), CollectiveLog(None, fail), Position(), torch.device("cpu"), fail)
        self.glanced = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found = None
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.found is not None:
            kind = kinds[id(func)]
            self.glanced.add(kind.name)
            assert self.found == self._look(kind, args, kwargs or {}, out, 0)
        return out

    def _glance(self, kind, args, out, now_ns):
        self.found = super()._glance(kind, args, out, now_ns)
        return self.found

    def _glance_at_view(self, value, now_ns):
        self.found = super()._glance_at_view(value, now_ns)
        return self.found


def both_ways(work):
    with BothWays() as mode:
        work()  # the first call of an operator, in which it is learnt, goes the general way
        work()
    return {name.partition("::")[2] for name in mode.glanced}


def nested():
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])


A, B = torch.zeros(6, 4), torch.ones(4, 6)
IMAGE, SPARSE = torch.zeros(2, 3, 8, 8), torch.eye(4).to_sparse()


@pytest.mark.parametrize(
    "work, operators",
    [
        (lambda: A.clone()[2:].t().unsqueeze(0), {"clone", "slice", "t", "unsqueeze"}),
        (lambda: A.split(2), {"split"}),
        (lambda: torch.unsafe_split(A, 2), {"unsafe_split"}),
        (lambda: (A @ B, A @ A.t().contiguous()), {"mm"}),
        (lambda: torch.addmm(torch.ones(1).expand(6), A, B), {"addmm"}),
        (lambda: (A @ A.t(), torch.addcmul(A, A[:1], A), torch.addcmul(A[:1], A, A)), {"mm", "addcmul"}),
        (lambda: A * A + A.t().expand(3, 4, 6).sum(0).t(), {"mul", "add", "sum"}),
        (lambda: A.clone().add_(A, alpha=2).addcmul_(A, A).transpose_(0, 1), {"add_", "addcmul_", "transpose_"}),
        (lambda: F.layer_norm(A, (4,)), {"native_layer_norm"}),
        (lambda: F.conv2d(IMAGE, torch.zeros(4, 3, 3, 3), stride=2), {"convolution"}),
        (lambda: torch.native_dropout(A, 0.5, True), {"native_dropout"}),
        (lambda: A.sum().item(), {"_local_scalar_dense"}),
        (lambda: torch.empty(4).lerp_(torch.ones(4), 0.5), {"empty", "lerp_"}),
    ],
)  # fmt: skip
def test_the_quick_way_finds_what_the_general_way_finds(work, operators):
    assert operators <= both_ways(work)


@pytest.mark.parametrize(
    "work",
    [
        lambda: SPARSE * 2,  # no storage
        lambda: torch.empty(0, 4) * 2,  # no elements
        lambda: torch.zeros(4).resize_(8),  # another storage than it came with
        lambda: torch.zeros(4).set_(torch.zeros(8)),
        lambda: torch.zeros(4, device="meta") * 2,
        lambda: F.linear(nested(), torch.ones(3, 4)),  # no shape
    ],
)
def test_tensors_that_are_not_plain_go_the_general_way(work):
    assert not {"mul", "resize_", "set_"} & both_ways(work)


def test_a_result_that_autograd_keeps_is_cut_from_its_graph_by_no_operator():
    called = []

    class Script(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    result = torch.ones(3, requires_grad=True).exp()
    with Script():
        cut = without_cycle(result)

    assert (cut.grad_fn, called) == (None, [])
    assert cut.data_ptr() == result.data_ptr()
