"""Who holds, beside autograd, what it keeps."""

import torch

from memadvisor.capture.holders import Holders
from memadvisor.capture.label_log import LabelLog


def saved(holders, tensor, address):
    """As the pack hook does: an alias of its own, and what stands for it."""
    alias = tensor.data
    return alias, holders.save(alias.untyped_storage(), address)


def test_a_storage_is_held_as_long_as_the_script_has_a_tensor_or_a_view_of_it():
    log = LabelLog()
    holders = Holders(log)
    first, second = torch.ones(3, 4), torch.ones(4)
    kept = [saved(holders, first, 1), saved(holders, first, 1), saved(holders, second, 2)]
    view = first[0]
    del first, second
    holders.look()
    del view
    before_ns = log.held[0].time_ns
    holders.look()

    assert [(held.address, held.time_ns) for held in log.held] == [(1, before_ns)]
    assert len(kept) == 3


def test_where_much_is_held_some_boundaries_go_by_but_none_that_must_not():
    log = LabelLog()
    holders = Holders(log)
    tensors = [torch.ones(1) for _ in range(3000)]
    kept = [saved(holders, tensor, number) for number, tensor in enumerate(tensors)]
    holders.look()
    times = [held.time_ns for held in log.held]
    holders.look()
    assert len(kept) == len(times) == 3000
    assert [held.time_ns for held in log.held] == times
    holders.look(must=True)
    assert all(held.time_ns > time_ns for held, time_ns in zip(log.held, times, strict=True))
