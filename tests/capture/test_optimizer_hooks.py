"""Recorders come and go while the script's optimizers step, and no step ends with an error for it."""

import threading

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from memadvisor.capture.optimizer_hooks import tell_of_updates

TABLES = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


def nothing(optimizer):
    pass


def stepping():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5), parameter


@pytest.fixture
def others():
    """Hooks of the script's own, which come after ours."""
    mark = tell_of_updates(nothing, nothing)
    seen = []
    handles = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    yield seen, mark
    for handle in handles:
        handle.remove()
    tell_of_updates(nothing, nothing)()  # takes the pair along that had to stay


def test_a_recorder_that_gives_up_inside_a_step_does_not_end_it(others):
    """As at the end of a step that cannot be written, with an engine's hooks beside its own."""
    seen, mark = others
    mark()
    stop = []
    stop.append(tell_of_updates(nothing, lambda optimizer: stop[0]()))
    optimizer, parameter = stepping()
    for _ in range(3):
        optimizer.step()

    assert seen == ["before", "after"] * 3
    assert parameter.tolist() == [-0.5, -0.5]


def test_a_recorder_that_ends_while_another_thread_steps_does_not_end_that_step(others):
    _, mark = others
    inside, gone = threading.Event(), threading.Event()

    def wait(*_):
        inside.set()
        gone.wait(timeout=60)

    handle = torch_optimizer.register_optimizer_step_post_hook(wait)
    optimizer, parameter = stepping()
    failures = []

    def step():
        try:
            optimizer.step()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    assert inside.wait(timeout=60)
    mark()
    gone.set()
    thread.join()
    handle.remove()

    assert failures == []
    assert parameter.tolist() == [0.5, 0.5]


def test_the_pair_stays_no_longer_than_it_must(others, monkeypatch):
    _, mark = others
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # other tests may have left threads
    before = [len(table) for table in TABLES]
    mark()

    assert [len(table) for table in TABLES] == [count - 1 for count in before]


def test_each_recorder_is_told_until_it_goes(others):
    told = []
    stop = [
        tell_of_updates(
            lambda _, name=name: told.append(("before", name)),
            lambda _, name=name: told.append(("after", name)),
        )
        for name in ("outer", "inner")
    ]
    optimizer, _ = stepping()
    optimizer.step()
    stop[1]()
    optimizer.step()
    stop[0]()
    optimizer.step()

    assert told == [
        *(("before", "outer"), ("before", "inner"), ("after", "outer"), ("after", "inner")),
        *(("before", "outer"), ("after", "outer")),
    ]
