"""Blocks that torch.compile has made run again; those whose forward is the script's own are left alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memadvisor.engines.activations.second_run import Conditions
from memadvisor.engines.apply import apply
from memadvisor.errors import PlanError
from memadvisor.plan import UnitPlan
from tests.engines.activations.test_recompute import new_model, train_alone
from tests.engines.trainings import applied, make_plan


@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"batch_norm": True}])
def test_blocks_that_torch_compile_has_made_run_again(options):
    """Each has a forward of its own, which comes before that of its class."""
    runs = []

    def backend(graph, inputs):
        made = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        return lambda *args: (runs.append(1), made(*args))[1]

    def model():
        torch._dynamo.reset()
        made = new_model(**options)
        for place, block in enumerate(made.blocks):
            made.blocks[place] = torch.compile(block, backend=backend)
        return made

    plain, plain_runs = train_alone(model(), steps=3), len(runs)
    with applied(make_plan(1, policy="every-layer")):
        made = model()
        ours = train_alone(made, steps=3)
        copied = copy.deepcopy(made)
    assert len(runs) == plain_runs + 2 * plain_runs
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])
    assert train_alone(copied, steps=1)[0] == train_alone(made, steps=1)[0]
    assert "forward" not in vars(type(made.blocks[0]))


@pytest.mark.parametrize("how", ["replaced", "compiled"])
def test_blocks_with_forwards_of_their_own_are_left_alone(how):
    def model():
        torch._dynamo.reset()
        made = new_model()
        for block in made.blocks:
            if how == "compiled":
                block.compile(backend="eager", fullgraph=True)
            else:
                block.forward = lambda x, forward=block.forward: forward(x) * 2
        return made

    plain = train_alone(model(), steps=3)
    with applied(make_plan(1, policy="every-layer")):
        ours = train_alone(model(), steps=3)
    assert ours[0] == plain[0]


def test_a_model_that_is_compiled_in_place_is_refused_with_the_way_out():
    torch._dynamo.reset()
    model = new_model()
    model.compile(backend="eager")
    with (
        pytest.raises(PlanError, match=r"in place \(model\.compile\(\)\)"),
        applied(make_plan(1, policy="every-layer")),
    ):
        train_alone(model, steps=1)


def test_a_class_that_is_wrapped_is_compiled_elsewhere_as_without_us():
    """The head is a Linear, and so are layers inside of compiled blocks."""

    def model():
        torch._dynamo.reset()
        made = new_model()
        for place, block in enumerate(made.blocks):
            made.blocks[place] = torch.compile(block, backend="eager", fullgraph=True)
        return made

    plain = train_alone(model(), steps=2)
    units = (
        UnitPlan(name="head", zero_stage=0, recompute=True),
        UnitPlan(name="blocks.1", zero_stage=0, recompute=False, activation_tier="disk"),
    )
    with applied(make_plan(1, units=units)):
        ours = train_alone(model(), steps=2)
    assert ours[0] == plain[0]


def test_blocks_that_are_compiled_at_ddps_buckets_run_again():
    """Dynamo makes of a block that is larger than DDP's buckets a module that calls the parts of it, and looks at how a
    module of that class is called: it cannot look through a descriptor of ours."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    runs = []

    def backend(graph, inputs):
        return lambda *args: (runs.append(1), graph(*args))[1]

    def losses(plan):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(*(torch.nn.Linear(600, 600, bias=False) for _ in range(2))) for _ in range(2)
        ]
        blocks = [torch.compile(block, backend=backend) for block in layers]
        model = DistributedDataParallel(torch.nn.Sequential(*blocks), bucket_cap_mb=1)
        found = None if plan is None else apply(plan, model.module)
        losses = []
        for _ in range(2):
            loss = model(torch.randn(4, 600)).square().mean()
            loss.backward()
            losses.append(loss.item())
        if found is not None:
            found.remove()
        return losses

    try:
        plain, plain_runs = losses(None), len(runs)
        assert losses(make_plan(1, policy="every-layer")) == plain
        assert plain_runs == 2 * 2 * 2  # of two steps, two blocks and two parts of each
        assert len(runs) == 3 * plain_runs
    finally:
        dist.destroy_process_group()


def test_a_second_run_is_inside_the_ddp_that_the_first_one_was_in():
    """Dynamo cuts graphs at DDP's buckets, by the DDP whose forward runs; in the backward none does."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        wrapper = DistributedDataParallel(torch.nn.Linear(1, 1))
        with wrapper._inside_ddp_forward():
            conditions = Conditions(())
        with conditions.again():
            assert DistributedDataParallel._active_ddp_module is wrapper
        assert DistributedDataParallel._active_ddp_module is None
    finally:
        dist.destroy_process_group()
