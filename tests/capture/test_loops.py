"""Calls are counted within one call of whatever made them."""

from dataclasses import replace

import torch

from memadvisor.capture.loops import LoopCounter
from memadvisor.capture.module_info import ModuleInfo

MODEL = ModuleInfo("", "", is_unit=False, is_root=True)
FIELD = ModuleInfo("field", "", is_unit=False, is_root=False, is_plain=True)
BLOCK = ModuleInfo("block", "block", is_unit=True, is_root=False)


def called(*calls):
    """Calls by their stacks, in order; each ends before the next one that is not inside of it."""
    counter, stack = LoopCounter(), []
    for around in calls:
        while stack != around[:-1]:
            stack.pop()
            counter.leave(stack)
        stack.append(around[-1])
        counter.enter(around[-1], stack)
    return counter


def test_calls_of_one_call_count_together_and_those_of_two_do_not():
    counter = called([MODEL], [MODEL, FIELD], [MODEL, FIELD], [MODEL], [MODEL, FIELD])
    seen = counter.end()

    assert seen.most == {"": 2, "field": 2}
    assert seen.inside[""] == {"field": 2}


def test_a_backward_lies_between_calls_of_two_micro_batches():
    counter = called([MODEL])
    counter.see_backward()
    counter.leave([])
    counter.enter(MODEL, [MODEL])

    assert counter.end().most == {"": 1}


def test_what_a_block_is_lent_is_a_part_of_its_forward():
    counter = called([MODEL], [MODEL, BLOCK], [MODEL, BLOCK, FIELD], [MODEL, BLOCK, FIELD])

    assert counter.end().most == {"": 1, "block": 1}


def test_calls_without_gradients_and_those_of_another_module_of_the_name_do_not_count():
    with torch.no_grad():
        assert not called([MODEL], [MODEL]).end().most

    assert called([MODEL], [replace(MODEL)]).end().most == {"": 1}
