"""Updates one step late, under the next step: every loss is that of the same written by hand, in every bit."""

from __future__ import annotations

import copy

import pytest
import torch

from memadvisor.errors import PlanError
from tests.engines.trainings import Model, applied, clipped_gradients, make_optimizer, make_plan

DELAYED = make_plan(1, optimizer_tier="disk", delayed_update=True)


def new_model():
    torch.manual_seed(3)
    return Model(tied=True, batch_norm=True, dropout=0.1)


def loop(model, step_of, steps=6, accumulate=2, each_step=lambda number: None):
    """Losses of a training whose update is `step_of`, with clipping and accumulation."""
    torch.manual_seed(5)
    data, losses = torch.Generator().manual_seed(0), []
    for number in range(steps):
        losses += clipped_gradients(model, data, accumulate)
        step_of()
        each_step(number)
    return losses


def train(kind, plan=None, **options):
    """Losses, and what the state dicts say afterwards."""
    model = new_model()
    optimizer = make_optimizer(kind, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def update():
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    with applied(plan or make_plan(1)):
        losses = loop(model, update, **options)
        return losses, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


def by_hand(kind, **options):
    """Two copies of the model: gradients are of the one, and update the other, which follows a step later."""
    model = new_model()
    ahead = copy.deepcopy(model)
    optimizer = make_optimizer(kind, ahead)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def update():
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), ahead.parameters(), strict=True):
                parameter.copy_(other)
                other.grad, parameter.grad = parameter.grad, None
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    losses = loop(model, update, **options)
    parameters = {name: value.detach() for name, value in ahead.named_parameters()}
    return losses, model.state_dict() | parameters, optimizer.state_dict()


@pytest.mark.parametrize("kind", ["sgd", "groups", "Adam", "Adagrad"])
def test_every_loss_is_that_of_two_models_by_hand(kind):
    ours, hand = train(kind, DELAYED), by_hand(kind)
    assert ours[0] == hand[0] and ours[0] != train(kind)[0]
    hand[1].pop("head.weight", None), ours[1].pop("head.weight", None)  # tied
    torch.testing.assert_close(ours[1], hand[1], rtol=0, atol=0)
    torch.testing.assert_close(ours[2], hand[2], rtol=0, atol=0)


def test_what_is_saved_has_the_update_that_is_under_way():
    """A look at a state dict between two steps ends the delay of that one update."""
    model = new_model()
    optimizer = make_optimizer("adamw", model)
    seen = []

    def update():
        before = model.scale.detach().clone()
        optimizer.step()
        assert torch.equal(model.scale, before) or seen  # it has not moved yet
        assert all(parameter.grad is None for parameter in model.parameters())
        seen.append(model.state_dict()["scale"].clone())
        assert not torch.equal(seen[-1], before)

    with applied(DELAYED):
        losses = loop(model, update, steps=3)
    plain = new_model()
    other = make_optimizer("adamw", plain)

    def at_once():
        other.step()
        other.zero_grad()

    assert losses == loop(plain, at_once, steps=3)  # nothing was late after all


def test_a_gradient_that_the_script_holds_stays_as_it_was():
    model, held, copies = new_model(), [], []
    optimizer = make_optimizer("adamw", model)

    def update():
        held.append(model.scale.grad)
        copies.append(model.scale.grad.clone())
        optimizer.step()

    with applied(DELAYED):
        loop(model, update)
    assert all(map(torch.equal, held, copies))


def test_a_parameter_that_the_script_changes_meanwhile_is_found_out():
    model = new_model()
    optimizer = make_optimizer("adamw", model)

    def update():
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(-1, 1)

    plan = applied(DELAYED)
    with pytest.raises(RuntimeError, match="changed while its delayed update"), plan:
        loop(model, update)


def test_a_disk_that_cannot_be_read_ends_the_training(monkeypatch):
    import os

    model = new_model()
    optimizer = make_optimizer("adamw", model)

    def broken(number):
        if number == 2:
            monkeypatch.setattr(os, "preadv", lambda *arguments: (_ for _ in ()).throw(OSError(5, "broken")))

    with pytest.raises(RuntimeError, match="cannot be read back"), applied(DELAYED):
        loop(model, lambda: (optimizer.step(), optimizer.zero_grad()), each_step=broken)


def test_state_that_a_scaler_unscales_in_the_step_is_refused():
    model = new_model()
    optimizer = make_optimizer("adamw", model)
    optimizer.grad_scale = torch.ones(())
    with applied(DELAYED), pytest.raises(PlanError, match="GradScaler"):
        loop(model, optimizer.step)
