"""Optimizer state in 8 bits: a training near to the plain one, and what is in memory meanwhile."""

import contextlib
import copy
import io

import pytest
import torch
import torch.nn.functional as F

from memadvisor.coded_states import TABLES_BYTES, coded_bytes
from memadvisor.engines.sharding.late import LateTensor
from tests.engines.allocator import open_account
from tests.engines.trainings import Model, applied, make_optimizer, make_plan

CODED = make_plan(1, optimizer_bits=8)
DIM = 96  # of whose matrices have more than 4096 elements, biases and norms less


def train(kind, plan=None, *, steps=40, each_step=None, **options):
    """Losses of a small language model that learns; its optimizer when the plan has been taken off."""
    torch.manual_seed(3)
    model = Model(dim=DIM)
    optimizer = make_optimizer(kind, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    data, losses = torch.Generator().manual_seed(0), []
    with contextlib.nullcontext() if plan is None else applied(plan, **options):
        for step in range(steps):
            words = torch.randint(0, 13, (8, 6), generator=data)
            loss = F.cross_entropy(model(words).flatten(0, 1), (words * 5 % 13).flatten())
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if each_step is not None:
                each_step(model, optimizer, step)
    return losses, optimizer


def coded_keys(optimizer):
    return {k for s in optimizer.state.values() for k, v in s.items() if type(v) is LateTensor}


@pytest.mark.parametrize(
    ("kind", "keys", "tolerance"),
    [
        ("groups", {"exp_avg", "exp_avg_sq"}, 0.03),
        ("slow sgd", {"momentum_buffer"}, 0.01),
        ("Adamax", {"exp_avg", "exp_inf"}, 0.03),
        ("ASGD", set(), 0.0),
    ],
)
def test_losses_are_near_those_without(kind, keys, tolerance):
    """By means of ten steps, as parts of the first loss; and no random number is drawn."""
    found = []
    ours, optimizer = train(kind, CODED, each_step=lambda m, o, s: found.append(coded_keys(o)))
    drawn = torch.get_rng_state()
    plain, _ = train(kind)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(coded == keys for coded in found)
    assert not coded_keys(optimizer)  # taken off, all is as the script knows it
    assert (ours != plain) == bool(keys)
    for start in range(0, len(plain), 10):
        means = (sum(losses[start : start + 10]) / 10 for losses in (ours, plain))
        assert next(means) == pytest.approx(next(means), abs=tolerance * plain[0])


def test_small_states_and_step_counters_stay_as_they_are():
    def look(model, optimizer, step):
        for parameter, state in optimizer.state.items():
            is_coded = parameter.numel() >= 4096
            assert (type(state["exp_avg"]) is LateTensor) == is_coded
            assert type(state["step"]) is torch.Tensor

    train("adamw", CODED, steps=2, each_step=look)


def test_a_variance_that_is_a_difference_stays_as_it_is():
    def centered(model):
        return torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True, momentum=0.9)

    model = Model(dim=DIM)
    with applied(CODED):
        optimizer = centered(model)
        model(torch.arange(6)[None]).sum().backward()
        optimizer.step()
        assert coded_keys(optimizer) == {"momentum_buffer"}


def test_what_is_saved_is_plain_and_goes_on_as_it_was():
    """A state dict of float32, that may be loaded with the plan or without it; what is loaded is coded again."""
    saved = {}

    def save(model, optimizer, step):
        if step == 2:
            file = io.BytesIO()
            torch.save([model.state_dict(), optimizer.state_dict()], file)
            saved["bytes"] = file.getvalue()
            copied = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(torch.load(io.BytesIO(saved["bytes"]))[1])
            assert coded_keys(optimizer) == {"exp_avg", "exp_avg_sq"}
            torch.testing.assert_close(optimizer.state_dict()["state"], copied["state"], rtol=0, atol=0)

    reloaded, _ = train("adamw", CODED, steps=5, each_step=save)
    through, _ = train("adamw", CODED, steps=5)
    assert reloaded == through
    weights, state = torch.load(io.BytesIO(saved["bytes"]))
    assert {value.dtype for values in state["state"].values() for value in values.values()} == {torch.float32}
    model = Model(dim=DIM)
    model.load_state_dict(weights)
    optimizer = make_optimizer("adamw", model)
    optimizer.load_state_dict(state)
    assert type(optimizer.state[model.head.weight]["exp_avg"]) is torch.Tensor


def resting_bytes(plan):
    """Of torch's CPU allocator between two steps, above what is there before the model."""
    found = []
    with open_account() as account:
        before = account.allocated_bytes()
        train("adamw", plan, steps=3, each_step=lambda m, o, s: found.append(account.allocated_bytes()))
    return found[-1] - before


def test_memory_between_steps_is_that_of_the_formula():
    large = [p.numel() for p in Model(dim=DIM).parameters() if p.numel() >= 4096]
    saved_bytes = 2 * sum(4 * count - coded_bytes(count) for count in large) - TABLES_BYTES
    assert resting_bytes(None) - resting_bytes(CODED) == saved_bytes


def test_a_plan_that_codes_nothing_says_so():
    notes = []
    train("ASGD", CODED, steps=6, note=lambda level, text: notes.append(text))
    assert len(notes) == 2 and "optimizer_bits has no effect: ASGD keeps nothing" in notes[1]


def test_it_says_that_it_is_lossy_and_what_it_has_done():
    notes = []
    train("adamw", CODED, steps=5, note=lambda level, text: notes.append((level, text)))
    (first, lossy), (second, done) = notes
    assert first == "warning" and "This plan is lossy: optimizer state" in lossy and "8 bits" in lossy
    assert second == "info" and "of optimizer state of 3 units in 8 bits" in done and "coding" in done
