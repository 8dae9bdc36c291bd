"""What cannot be done rightly is refused in one line, before the first update."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed._composable.replicate import replicate
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.checkpoint import checkpoint

from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_plan


def same(a, b) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def refusals(rank: int) -> dict[str, str]:
    """What each script is told, and that nothing was updated before."""
    told = {}

    def attempt(name, plan, script):
        with applied(plan):
            try:
                script()
            except PlanError as error:
                told[name] = error.one_line()
        dist.barrier()

    def with_optimizer(make):
        def script():
            ddp = build(Training(), rank)
            before = {name: value.clone() for name, value in ddp.state_dict().items()}
            optimizer = make(ddp)
            ddp(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
            try:
                optimizer.step(lambda: 0.0)
            finally:
                assert same(ddp.state_dict(), before)

        return script

    def past_ddp():
        ddp = build(Training(), rank)
        ddp.module(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()

    def own_gradient():
        ddp = build(Training(), rank)
        loss = ddp(torch.zeros(2, 3, dtype=torch.long)).square().mean()
        for parameter in ddp.parameters():
            parameter.grad = torch.ones_like(parameter)
        loss.backward()

    def hook():
        build(Training(), rank).register_comm_hook(None, lambda state, bucket: None)

    def own_collective():
        ddp = build(Training(), rank)
        ddp(torch.zeros(2, 3, dtype=torch.long)).square().mean().backward()
        dist.all_reduce(ddp.module.head.weight.grad)

    def by_parameters():
        ddp = build(Training(), rank)
        loss = ddp(torch.zeros(2, 3, dtype=torch.long)).square().mean()
        torch.autograd.grad(loss, list(ddp.module.blocks[0].parameters()))

    def derivative():
        """A gradient penalty: the first backward's graph keeps parameters for the second."""
        ddp = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
        )
        x = torch.ones(2, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
        slope.square().mean().backward()

    own_group = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]

    def over_some_ranks():
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), process_group=own_group)

    def in_backward():
        model = torch.nn.Linear(2, 2)
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        torch.nn.parallel.DistributedDataParallel(model)

    def composed():
        replicate(torch.nn.Linear(4, 4))(torch.ones(2, 4))

    def comes_again(stage):
        """Two calls of one block, each behind a checkpoint with a backward of its own: DDP counts them in a static graph."""

        class Twice(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.block = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))

            def forward(self, x):
                for _ in range(2):
                    x = checkpoint(self.block, self.first(x) if x.grad_fn is None else x, use_reentrant=True)
                return x

        def script():
            ddp = torch.nn.parallel.DistributedDataParallel(Twice(), static_graph=True)
            before = {name: value.clone() for name, value in ddp.state_dict().items()}
            try:
                ddp(torch.ones(2, 4)).square().mean().backward()
            finally:
                assert same(ddp.state_dict(), before)

        attempt(f"again {stage}", make_plan(2, stage, fingerprint=None), script)

    attempt("in backward", make_plan(2, 1), in_backward)
    attempt("composed", make_plan(2, 2), composed)
    attempt("lbfgs", make_plan(2, 1), with_optimizer(lambda ddp: torch.optim.LBFGS(ddp.parameters())))
    attempt("ranks", make_plan(3, 2), lambda: build(Training(), rank))
    attempt("some ranks", make_plan(2, 0), over_some_ranks)
    attempt("model", make_plan(2, 2, fingerprint="1" * 16), lambda: build(Training(), rank))
    attempt("past", make_plan(2, 2), past_ddp)
    attempt("gradient", make_plan(2, 3), own_gradient)
    attempt("hook", make_plan(2, 0), hook)
    attempt("collective", make_plan(2, 2), own_collective)
    attempt("by parameters", make_plan(2, 3), by_parameters)
    attempt("derivative", make_plan(2, 3, fingerprint=None), derivative)
    for stage in range(4):
        comes_again(stage)
    return told


def test_what_cannot_be_done_rightly_is_refused_in_one_line():
    expected = {
        "in backward": "optimizers inside the backward",
        "composed": "around a list of parameters, as torch's composable `replicate` makes it",
        "lbfgs": "LBFGS searches along one line for all parameters",
        "ranks": "for 3 ranks, and the script's DDP has 2",
        "some ranks": "DistributedDataParallel over 1 of its 2 ranks, as pipelines beside each other",
        "model": "for another model",
        "past": "past DDP itself",
        "gradient": "sets the gradient",
        "hook": "communication hooks",
        "collective": "changes gradients by allreduce_",
        "by parameters": "torch.autograd.grad",
        "derivative": "a derivative that it differentiates once more",
        **{f"again {stage}": "comes again in one backward" for stage in range(4)},
    }
    for told in run_ranks(refusals, 2, timeout_s=60):
        assert told.keys() == expected.keys()
        for name, text in expected.items():
            assert text in told[name] and "Hint:" in told[name] and "\n" not in told[name]
