"""Parameters that the script puts elsewhere (`p.data = values`) are trained there, as without a plan."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from memadvisor.errors import PlanError
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan, micro_batch_loss

# Optimizer, stage, what else the plan says.
KINDS = {
    "stage 1": ("adamw", 1, {}),
    "stage 2": ("sgd", 2, {}),
    "updated in the backward": ("adamw", 2, {"update_in_backward": True}),
    "whole parameters": ("Adafactor", 1, {}),
    "gathered late": ("adamw", 2, {"overlap": True}),
}


def _train(rank: int, optimizer_kind: str) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """From the third step on two weights lie where the script holds them, and in the fifth all lie in one vector.

    Gives losses, parameters, and what the script holds.
    """
    training = Training(optimizer=optimizer_kind)
    ddp = build(training, rank)
    optimizer = make_optimizer(optimizer_kind, ddp)
    data = torch.Generator().manual_seed(rank)
    losses, held = [], []
    for step in range(7):
        if step == 3:
            for parameter in list(ddp.parameters())[2:4]:
                held.append(parameter.detach() * 0.5)
                parameter.data = held[-1]
        if step == 5:
            vector_to_parameters(parameters_to_vector(ddp.parameters()).detach() * 0.9, ddp.parameters())
        losses.append(micro_batch_loss(training, ddp, data, use_extra=False))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in ddp.module.parameters()], held


def _both(rank, kind):
    optimizer, stage, options = KINDS[kind]
    plain = _train(rank, optimizer)
    with applied(make_plan(2, stage, **options)):
        planned = _train(rank, optimizer)
    return plain, planned


@pytest.mark.parametrize("kind", KINDS)
def test_losses_weights_and_what_the_script_holds_are_those_of_ddp(kind):
    for plain, planned in run_ranks(_both, 2, kind):
        assert planned[0] == pytest.approx(plain[0], rel=1e-5)
        for ours, theirs in zip((*planned[1], *planned[2]), (*plain[1], *plain[2]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _refusal(rank, change):
    with applied(make_plan(2, 1)):
        ddp = build(Training(), rank)
        optimizer = make_optimizer("adamw", ddp)
        micro_batch_loss(Training(), ddp, torch.Generator().manual_seed(rank), use_extra=False)
        first, second = (block.norm.weight for block in ddp.module.blocks[:2])
        first.data = first.data.to(torch.float64) if change == "dtype" else second.data
        try:
            optimizer.step()
        except PlanError as error:
            return error.one_line()


@pytest.mark.parametrize(("change", "word"), [("dtype", "float64"), ("memory", "shares its memory")])
def test_what_cannot_be_followed_is_refused_in_one_line(change, word):
    for said in run_ranks(_refusal, 2, change):
        assert word in said and "stage 1" in said
