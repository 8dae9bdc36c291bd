"""Where gradients meet: what autograd's engine would do without our mode, told from within the mode."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.capture.meeting_gradients import as_added_in_place, may_be_overwritten
from memadvisor.capture.truth import AllocatorEvent

_ADD = torch.ops.aten.add.Tensor


def three_products(y):
    return sum(part.sum() for part in (y * 3, y * 4, y * 5))


def twice_the_same(y):
    """Both gradients of the inner sum are one tensor."""
    return ((y + y) * 3 + y).sum()


def views(y):
    return y.view(-1).sigmoid().sum() + y.t().sigmoid().sum()


def residual(y):
    return (y + y.sigmoid()).tanh().sum()


def halves(y):
    """Gradients that are parts of a larger storage, or made of parts."""
    first, second = y.chunk(2)
    return (first * second + first).sum() + torch.cat([y, y * 2]).tanh().sum()


def hooked(y):
    """Somebody keeps a gradient that he was shown."""
    z = y * 1
    z.register_hook(KEPT.append)
    return z.sigmoid().sum() + (y * 2).sigmoid().sum()


KEPT = []
GRAPHS = [three_products, twice_the_same, views, residual, halves, hooked]


class Asking(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.answers = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _ADD:
            self.answers.append(may_be_overwritten(*args))
        return func(*args, **(kwargs or {}))


def loss_of(graph):
    KEPT.clear()
    return graph(torch.ones(6, 4, requires_grad=True) * 2)


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_rule_is_autograds(graph):
    """Without a mode the profiler says which additions were in place."""
    loss = loss_of(graph)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    added = [event.name for event in profiler.events() if event.name in ("aten::add", "aten::add_")]
    loss, mode = loss_of(graph), Asking()
    with mode:
        loss.backward()

    assert len(added) >= 1
    assert mode.answers == [name == "aten::add_" for name in added]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_the_backward_is_added_aside():
    loss, mode = loss_of(residual), Asking()
    with mode:
        loss.backward(create_graph=True)

    assert mode.answers
    assert not any(mode.answers)


def event(time_ns, address, delta_bytes, total_bytes, *, is_meeting=False):
    return AllocatorEvent(time_ns, address, delta_bytes, total_bytes, 0, "", is_meeting)


def test_the_first_ends_where_the_sum_begins():
    born, other = event(10, 3, 100, 300, is_meeting=True), event(11, 4, 7, 307)
    events = [event(1, 1, 100, 100), event(2, 2, 100, 200), born, other, event(12, 1, -100, 207)]
    moved = as_added_in_place(events, [(9, 11, 1)])

    assert [(e.time_ns, e.address, e.delta_bytes, e.allocated_bytes) for e in moved] == [
        (1, 1, 100, 100), (2, 2, 100, 200), (10, 1, -100, 100), (10, 3, 100, 200), (11, 4, 7, 207),
    ]  # fmt: skip


def test_a_block_may_have_had_more_than_was_asked_for():
    """Of a GPU: a rest of up to 1 MiB is not split off. One that had far more is another's."""
    born, other = event(10, 3, 100, 330, is_meeting=True), event(11, 4, 7, 337)
    events = [event(1, 1, 130, 130), event(2, 2, 100, 230), born, other, event(12, 1, -130, 207)]
    moved = as_added_in_place(events, [(9, 11, 1)])
    larger = [dataclasses.replace(e, delta_bytes=e.delta_bytes * 2**20) for e in events]

    assert [(e.time_ns, e.address, e.delta_bytes, e.allocated_bytes) for e in moved] == [
        (1, 1, 130, 130), (2, 2, 100, 230), (10, 1, -130, 100), (10, 3, 100, 200), (11, 4, 7, 207),
    ]  # fmt: skip
    assert as_added_in_place(larger, [(9, 11, 1)]) == larger


@pytest.mark.parametrize("added", [[], [(3, 9, 1)], [(9, 11, 5)]])
def test_what_did_not_meet_stays(added):
    """Nothing was added; no sum was born in that time; the first outlived the step."""
    events = [event(1, 1, 100, 100), event(10, 3, 100, 200, is_meeting=True), event(12, 1, -100, 100)]

    assert as_added_in_place(events, added) == events
