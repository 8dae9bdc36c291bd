"""What plans leave to DistributedDataParallel is named."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memadvisor.run.ddp_options import options_left_to_ddp


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_of_what_all_scripts_have_there_is_none():
    assert options_left_to_ddp(DistributedDataParallel(torch.nn.Linear(4, 4))) is None


def test_parameters_that_it_ignores_are_named():
    """As torchrec has them, whose tables lie on one rank each: plans of ZeRO were advised, and refused by `run`."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    assert options_left_to_ddp(DistributedDataParallel(model)) == (
        "parameters that DistributedDataParallel ignores"
    )


def test_delayed_reductions_are_named():
    model = torch.nn.Linear(4, 4)
    delayed = [("weight", model.weight)]
    ddp = DistributedDataParallel(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model.bias
    )
    assert "`delay_all_reduce_named_params`" in options_left_to_ddp(ddp)
