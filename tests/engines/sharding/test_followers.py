"""Memory of parameters that the script holds stays theirs under every stage, as it does without a plan."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, Training, applied, make_optimizer, make_plan, micro_batch_loss


def _given(parameters):
    held = [parameter.data.clone() for parameter in parameters]
    for parameter, values in zip(parameters, held, strict=True):
        parameter.data = values
    return held


def _vector(parameters):
    vector = parameters_to_vector(parameters).detach().clone()
    vector_to_parameters(vector, parameters)
    return [vector]


# What the script takes of a model's parameters, once.
TAKEN = {
    "data": lambda parameters: [p.data for p in parameters],
    "detached": lambda parameters: [p.detach() for p in parameters],
    "parts": lambda parameters: [p.data.view(-1)[: p.numel() // 2] for p in parameters],
    "of numpy": lambda parameters: [torch.from_numpy(p.detach().numpy()) for p in parameters],
    "given": _given,
    "vector": _vector,
}
# Stage, what else the plan says.
PLANS = {
    "stage 1": (1, {"overlap": True}),
    "stage 2": (2, {}),
    "unit by unit": (2, {"overlap": True, "update_by_unit": True}),
    "stage 3": (3, {}),
    "stage 3 ahead": (3, {"overlap": True, "update_by_unit": True}),
}


def _train(rank, take, is_early):
    """An average of what was taken, by step; then what was taken is changed, and one more step is done."""
    training = Training()
    torch.manual_seed(5)
    model = Model(unused=training.unused, **dict(training.model))
    parameters = list(model.parameters())
    held = take(parameters) if is_early else None
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    if held is None:
        held = take(parameters)
    average = [values.clone() for values in held]
    optimizer = make_optimizer("adamw", ddp)
    data = torch.Generator().manual_seed(rank)
    found = []
    for step in range(6):
        loss = micro_batch_loss(training, ddp, data, use_extra=False)
        optimizer.step()
        optimizer.zero_grad()
        for values, each in zip(held, average, strict=True):
            each.lerp_(values, 0.25)
        if step == 3:
            for values in held:
                values.mul_(0.9)
        found.append((loss, copy.deepcopy(average), [values.clone() for values in held]))
    return found


def _both(rank, taken, is_early, plan):
    stage, options = PLANS[plan]
    plain = _train(rank, TAKEN[taken], is_early)
    with applied(make_plan(2, stage, **options)):
        return plain, _train(rank, TAKEN[taken], is_early)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("taken", "is_early"), [("data", True), *((taken, False) for taken in TAKEN)])
def test_what_the_script_holds_is_read_and_written_as_without_a_plan(taken, is_early, plan):
    """Averages were of old values: of a step before in stages 1 and 2, of the beginning in stage 3."""
    for plain, planned in run_ranks(_both, 2, taken, is_early, plan):
        for (loss, *theirs), (our_loss, *ours) in zip(plain, planned, strict=True):
            assert our_loss == pytest.approx(loss, rel=1e-5)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def _is_let_go(rank):
    """Whether what nobody holds any more still follows, after one step more."""
    from memadvisor.engines.sharding.followers import Followers

    sizes = []
    fill = Followers.fill
    Followers.fill = lambda self, values_of: (fill(self, values_of), sizes.append(len(self._all)))
    try:
        training = Training()
        with applied(make_plan(2, 3)):
            ddp = torch.nn.parallel.DistributedDataParallel(Model(**dict(training.model)))
            optimizer = make_optimizer("adamw", ddp)
            data = torch.Generator().manual_seed(rank)
            held = ddp.module.head.weight.data
            for step in range(3):
                micro_batch_loss(training, ddp, data, use_extra=False)
                if step == 1:
                    del held
                optimizer.step()
                optimizer.zero_grad()
    finally:
        Followers.fill = fill
    return sizes


def test_what_nobody_holds_any_more_is_let_go():
    for sizes in run_ranks(_is_let_go, 2):
        assert sizes[0] > 0 and sizes[1:] == [0, 0]
