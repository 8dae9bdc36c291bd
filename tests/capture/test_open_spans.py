"""Where the profiler stops, nothing that it has begun to record is under way: it would write its end into freed memory."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch._C._profiler import RecordScope
from torch.autograd.profiler import record_function
from torch.utils.checkpoint import checkpoint

import memadvisor
from memadvisor.capture import truth
from memadvisor.capture.open_spans import (
    end_script_spans,
    is_inside_operator,
    look_outside,
    when_outside_operators,
)
from memadvisor.capture.truth import AllocatorAccount


@pytest.fixture
def stops(monkeypatch):
    """For each stop of the profiler, the names of what may have been under way: what ends later than where the stop began,
    and what Python code opens, which torch's tree has end with what it was opened in."""
    original, found = torch.autograd._disable_profiler, []

    def disable():
        now_ns = time.time_ns()
        result = original()
        pending, late = list(result.experimental_event_tree()), []
        while pending:
            node = pending.pop()
            is_scripts = getattr(node.extra_fields, "scope", None) == RecordScope.USER_SCOPE
            late += [node.name] if node.end_time_ns > now_ns or is_scripts else []
            pending += node.children
        found.append(late)
        return result

    monkeypatch.setattr(truth.autograd, "_disable_profiler", disable)
    return found


class Layer(nn.Module):
    """`fails_at` counts calls: in that one memory runs out."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.inner, self.num_calls, self.fails_at = nn.Linear(4, 4), 0, fails_at

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB.")
        return self.inner(x).relu()


class Model(nn.Module):
    def __init__(self, reentrant=None, fails_at=None):
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(4, 4), Layer(fails_at), reentrant

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            return self.layer(x).sum()
        return checkpoint(self.layer, x, use_reentrant=self.reentrant).sum()


def step(model, optimizer):
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    optimizer.zero_grad()


def plainly(model, optimizer):
    step(model, optimizer)


def in_a_span_of_the_scripts(model, optimizer):
    with record_function("the script's step"):
        step(model, optimizer)


def in_a_closure(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4))
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("train", [plainly, in_a_span_of_the_scripts, in_a_closure])
def test_where_a_step_ends(tmp_path, stops, train):
    model = Model()
    optimizer = (torch.optim.LBFGS if train is in_a_closure else torch.optim.AdamW)(model.parameters())
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            train(model, optimizer)

    assert prof.run.ranks[0].traced_step is not None and stops == [[]]


def test_where_updates_are_made_in_the_backward(tmp_path, stops):
    model = Model()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            model(torch.ones(2, 4)).backward()
            model.zero_grad()

    assert prof.run.ranks[0].traced_step is not None and stops == [[]]


@pytest.mark.parametrize(
    ("reentrant", "where"),
    [(None, "forward"), (False, "forward"), (True, "forward"), (False, "backward"), (True, "backward")],
)
def test_where_memory_runs_out(tmp_path, stops, reentrant, where):
    """The script goes on with the next step, and its event is told with what lived in the step."""
    calls_of_a_step = 1 if reentrant is None else 2
    model = Model(reentrant, fails_at=3 * calls_of_a_step + (2 if where == "backward" else 1))
    optimizer = torch.optim.AdamW(model.parameters())
    failed = []
    with memadvisor.profile(tmp_path / "run", trace_step=3) as prof:
        for number in range(8):
            try:
                step(model, optimizer)
            except torch.OutOfMemoryError:
                failed.append(number)
    rank = prof.run.ranks[0]

    assert failed == [3] and all(not late for late in stops) and len(stops) == 2
    (event,) = rank.out_of_memory
    assert (event.step, event.basis, event.requested_bytes) == (3, "trace", 5 * 2**30)
    assert rank.traced_step is not None and rank.traced_step.index > 3


def test_where_recording_fails_in_a_backward(tmp_path, stops, capfd):
    """What autograd's engine has taken over is taken off behind it: no mode is left to the script."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=2) as prof:
        fail = prof._recorder.fail
        for number in range(4):
            loss = model(torch.ones(2, 4))
            if number == 2:
                next(model.layer.parameters()).register_hook(lambda _: fail(ValueError("ours")))
            loss.backward()
            assert torch.utils._python_dispatch._get_current_dispatch_mode() is None or number < 2
            optimizer.step()
            optimizer.zero_grad()

    assert stops == [[]] and "ours" in capfd.readouterr().err


def test_what_was_opened_is_ended_once():
    """Where the script's spans are recorded, for a device's long steps."""
    account = AllocatorAccount(torch.device("cpu"), names_operators=False)
    with record_function("open"):
        end_script_spans()
        account.disable()
    end_script_spans()


def test_a_training_inside_of_a_functions_decorator_is_inside_no_function():
    seen = []

    class Decorated(torch.autograd.Function):
        @staticmethod
        @torch.no_grad()
        def forward(ctx, x):
            seen.append(is_inside_operator())
            return x

    @torch.no_grad()
    def train():
        return is_inside_operator()

    Decorated.apply(torch.ones(2))
    assert seen == [True] and not train()


def test_what_runs_inside_an_operator_is_told():
    seen = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(is_inside_operator())
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            seen.append(is_inside_operator())
            when_outside_operators(lambda: seen.append("after"))
            inner = torch.ones(1, requires_grad=True)
            with torch.enable_grad():
                inner.sum().backward()
            look_outside()  # of the inner one
            seen.append("before")
            return 2 * gradient

    Twice.apply(torch.ones(2, requires_grad=True)).sum().backward()
    look_outside()

    assert seen == [True, True, "before", "after"]
    assert not is_inside_operator()
