"""What a process says of the script's training beside what it records of it."""

import gc

import torch
import torch.distributed as dist
from torch import nn

from memadvisor.capture.writer import has_any_order, has_zero_optimizer, joins_ranks
from memadvisor.run.cut import is_around_a_list
from memadvisor.run.living import living


def test_an_optimizer_that_shares_out_its_states_is_seen():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    gc.collect()
    assert not has_zero_optimizer()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        optimizer = ZeroRedundancyOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, lr=0.1)
        assert has_zero_optimizer()
        del optimizer
    finally:
        dist.destroy_process_group()


def test_what_has_a_models_parameters_and_not_the_model_is_seen():
    """DistributedDataParallel as torch's composable `replicate` has it."""
    from torch.distributed._composable.replicate import replicate

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = replicate(nn.Linear(2, 2))
        model(torch.ones(1, 2))
        gc.collect()
        assert list(map(is_around_a_list, living(nn.parallel.DistributedDataParallel))) == [True]
        plain = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert not is_around_a_list(plain) and not has_any_order(plain)
        for option in ("find_unused_parameters", "static_graph"):
            assert has_any_order(nn.parallel.DistributedDataParallel(nn.Linear(2, 2), **{option: True}))
        del model
    finally:
        dist.destroy_process_group()


def test_ranks_that_may_run_out_of_data_are_seen():
    from torch.distributed.algorithms.join import Join

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert not joins_ranks(model)
        with Join([model], enable=False):  # as scripts write where all have as much
            assert not joins_ranks(model)
        with Join([model]):
            model(torch.ones(1, 2)).sum().backward()
            assert joins_ranks(model)
    finally:
        dist.destroy_process_group()
