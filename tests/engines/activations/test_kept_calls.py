"""Calls are counted from one backward to the next; those beyond the plan's run again."""

from types import SimpleNamespace

from torch import nn

from memadvisor.engines.activations.kept_calls import KeptCalls


def test_calls_are_counted_anew_behind_each_backward():
    hooks, module = SimpleNamespace(num_backwards=0), nn.Linear(1, 1)
    calls = KeptCalls(hooks)
    calls.attach(module, (1, 2))

    first = [calls.keeps_next(module) for _ in range(5)]
    hooks.num_backwards += 1
    second = [calls.keeps_next(module) for _ in range(2)]

    assert first == [False, True, True, False, False]
    assert second == [False, True]


def test_a_unit_of_which_the_plan_says_nothing_runs_again_in_all_calls():
    module = nn.Linear(1, 1)
    calls = KeptCalls(SimpleNamespace(num_backwards=0))
    calls.attach(module, (0,))
    calls.attach(module, ())

    assert not calls.keeps_next(module)
