"""Optimizers that run torch's fused update without having been asked to: as if the script had made them so, in every bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from memadvisor.plan import UnitPlan
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, Training, applied, clipped_gradients, make_plan, train

FUSED = make_plan(1, fused_updates=True)
KINDS = {
    "AdamW": lambda groups, **how: torch.optim.AdamW(groups, lr=1e-2, **how),
    "Adam": lambda groups, **how: torch.optim.Adam(groups, lr=1e-2, amsgrad=True, weight_decay=0.1, **how),
    "SGD": lambda groups, **how: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, **how),
    "foreach": lambda groups, **how: torch.optim.AdamW(groups, lr=1e-2, **(how or {"foreach": True})),
}


def new(make, **how):
    torch.manual_seed(3)
    model = Model(tied=True, batch_norm=True, dropout=0.1, dim=16)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return model, make([{"params": decay}, {"params": rest, "weight_decay": 0.0}], **how)


def steps(model, optimizer, count):
    torch.manual_seed(5)
    data, losses = torch.Generator().manual_seed(0), []
    for _ in range(count):
        losses += clipped_gradients(model, data, 2)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(make, plan=None, count=5, **how):
    """Losses, and both state dicts as the script sees them, while the plan is in force."""
    model, optimizer = new(make, **how)
    notes = []
    with applied(plan or make_plan(1), note=lambda level, text: notes.append(text)):
        losses = steps(model, optimizer, count)
        states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return losses, *states, notes


def settings_of(state_dict):
    return [(group.pop("fused"), group.pop("foreach")) for group in state_dict["param_groups"]]


@pytest.mark.parametrize("tier", ["device", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_weights_and_states_are_those_of_a_script_that_asked_for_it(kind, tier):
    plan = make_plan(1, fused_updates=True, optimizer_tier=tier)
    losses, weights, states, _ = trained(KINDS[kind], plan)
    asked = trained(KINDS[kind], fused=True)
    assert losses == asked[0] and losses[-1] != losses[0]
    torch.testing.assert_close(weights, asked[1], rtol=0, atol=0)
    assert settings_of(asked[2]) == [(True, None)] * 2
    assert settings_of(states) == [(None, True if kind == "foreach" else None)] * 2
    torch.testing.assert_close(states, asked[2], rtol=0, atol=0)


def test_in_the_step_it_is_the_fused_kernel_and_afterwards_the_scripts_own_again():
    model, optimizer = new(KINDS["AdamW"])
    names: list[list[str]] = []
    for plan in (FUSED, make_plan(1)):
        with applied(plan), torch.profiler.profile() as profiler:
            steps(model, optimizer, 2)
        names.append([event.key for event in profiler.key_averages()])
        assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(None, None)] * 2
    assert "aten::_fused_adamw_" in names[0] and "aten::addcdiv_" not in names[0]
    assert "aten::_fused_adamw_" not in names[1] and "aten::addcdiv_" in names[1]


def test_a_state_dict_loads_with_the_plan_and_without_and_training_goes_on_as_before():
    whole = trained(KINDS["AdamW"], FUSED, count=6)
    model, optimizer = new(KINDS["AdamW"])
    with applied(FUSED):
        first = steps(model, optimizer, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        assert [group["fused"] for group in optimizer.param_groups] == [True, True]
        assert [group["fused"] for group in optimizer.state_dict()["param_groups"]] == [None, None]
    assert first == whole[0][:6]
    without = new(KINDS["AdamW"])[1]
    without.load_state_dict(saved)
    assert [group["fused"] for group in without.param_groups] == [None, None]


def test_a_count_of_steps_is_as_the_scripts_own_optimizer_makes_it():
    """Of float64 scripts it is float64, and a fused update takes float32 alone."""
    torch.set_default_dtype(torch.float64)
    try:
        model, optimizer = new(KINDS["AdamW"])
        steps(model, optimizer, 1)  # without a plan
        with applied(FUSED):
            steps(model, optimizer, 2)
            counts = [state["step"] for state in optimizer.state.values()]
            saved = [state["step"] for state in optimizer.state_dict()["state"].values()]
        assert {count.dtype for count in counts} == {torch.float32}
        after = [state["step"] for state in optimizer.state.values()]
        assert {(count.dtype, float(count)) for count in (*saved, *after)} == {(torch.float64, 3.0)}
    finally:
        torch.set_default_dtype(torch.float32)


class Strange(torch.Tensor):
    """A subclass that a fused update may know nothing of."""


class Odd(torch.nn.Module):
    """Parameters of one kind that no fused update takes, beside usual ones."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.usual = torch.nn.Linear(4, 4)
        if kind == "sparse":
            self.odd = torch.nn.Embedding(7, 4, sparse=True)
        elif kind == "gaps":
            self.odd = torch.nn.Parameter(torch.randn(4, 8)[:, ::2])
        elif kind == "class":
            self.odd = torch.nn.Parameter(torch.randn(4, 6).as_subclass(Strange))
        else:
            self.odd = torch.nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        x = self.usual(x)
        if self.kind == "sparse":
            return x + self.odd(torch.tensor([1, 3, 1]))
        return x @ self.odd

    def loss(self):
        return self(torch.ones(3, 4)).square().mean()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("sparse", "sparse gradients"),
        ("gaps", "parameters with gaps in memory"),
        ("class", "parameters of the class Strange"),
        ("transposed", "gradients that are not laid out as their parameters"),
        ("loaded", "states that are not laid out as their parameters"),
    ],
)
def test_groups_that_a_fused_update_would_get_wrong_are_left_alone_and_named(kind, why):
    """A fused update goes through memory in its order: on a CPU it gives other numbers, and no error, for such layouts."""

    def losses(plan):
        torch.manual_seed(0)
        model, notes, found = Odd(kind), [], []
        optimizer = torch.optim.SGD(
            [{"params": model.usual.parameters()}, {"params": [p for n, p in model.named_parameters() if "odd" in n]}],
            lr=0.1,
            momentum=0.0 if kind == "sparse" else 0.9,
        )  # fmt: skip
        with applied(plan, note=lambda level, text: notes.append(text)):
            for number in range(4):
                optimizer.zero_grad()
                loss = model.loss()
                loss.backward()
                found.append(float(loss.detach()))
                if kind == "transposed":
                    model.odd.grad = model.odd.grad.t().contiguous().t()
                optimizer.step()
                if kind == "loaded" and number == 1:
                    state = optimizer.state_dict()
                    buffer = state["state"][2]["momentum_buffer"]
                    state["state"][2]["momentum_buffer"] = buffer.t().contiguous().t()
                    optimizer.load_state_dict(state)
            fused = [bool(group["fused"]) for group in optimizer.param_groups]
        return found, notes, fused

    ours, notes, fused = losses(FUSED)
    assert ours == pytest.approx(losses(make_plan(1))[0], rel=1e-6)
    assert [text for text in notes if why in text] and fused == [True, False]


def test_what_the_script_has_fused_itself_is_left_as_it_is_and_named():
    asked, ours = trained(KINDS["AdamW"], fused=True), trained(KINDS["AdamW"], FUSED, fused=True)
    assert asked[0] == ours[0] and settings_of(ours[2]) == settings_of(asked[2]) == [(True, None)] * 2
    assert "of the plan's fused_updates: the script has made a group of AdamW fused itself" in ours[3]


def test_gradients_that_come_in_a_closure_are_looked_at_when_it_has_run():
    """As Lightning trains. Before it, those of the step before are there, or none."""

    def losses(plan, as_keyword):
        torch.manual_seed(0)
        model, notes = Odd("sparse"), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model.loss()
            loss.backward()
            return loss.detach()

        with applied(plan, note=lambda level, text: notes.append(text)):
            words = {"closure": closure} if as_keyword else {}
            found = [float(optimizer.step(*([] if as_keyword else [closure]), **words)) for _ in range(3)]
        return found, notes

    for as_keyword in (False, True):
        ours, notes = losses(FUSED, as_keyword)
        assert ours == losses(make_plan(1), as_keyword)[0]
        assert [text for text in notes if "sparse gradients" in text]


def test_a_closure_is_run_once_a_step_and_the_update_is_fused():
    def trained_by_closure(plan, **how):
        model, optimizer = new(KINDS["AdamW"], **how)
        torch.manual_seed(5)
        data, losses = torch.Generator().manual_seed(0), []

        def closure():
            optimizer.zero_grad()
            losses.extend(clipped_gradients(model, data, 2))

        with applied(plan):
            for _ in range(4):
                optimizer.step(closure)
        return losses, model.state_dict()

    ours, asked = trained_by_closure(FUSED), trained_by_closure(make_plan(1), fused=True)
    assert ours[0] == asked[0] and len(ours[0]) == 8
    torch.testing.assert_close(ours[1], asked[1], rtol=0, atol=0)


def test_an_optimizer_without_a_fused_update_steps_as_it_does_and_is_named():
    plain = trained(lambda groups: torch.optim.NAdam(groups, lr=1e-2))
    ours = trained(lambda groups: torch.optim.NAdam(groups, lr=1e-2), FUSED)
    assert ours[0] == plain[0]
    assert "of the plan's fused_updates: NAdam has no fused update, and steps as it does" in ours[3]


def sharded(rank: int) -> dict[str, tuple[bool, bool]]:
    """By plan: whether losses and weights are in every bit those of the same plan under a script that asked for it."""
    units = tuple(
        UnitPlan(name=name, zero_stage=stage, recompute=False)
        for name, stage in (("", 3), ("blocks.0", 0), ("blocks.1", 1), ("blocks.2", 2))
    )
    plans = {
        "stage 1": {"zero": 1},
        "stage 2": {"zero": 2},
        "in the backward": {"zero": 3, "update_in_backward": True},
        "mixed": {"policy": "chosen", "units": units, "overlap": True},
        "8 bits": {"zero": 2, "optimizer_bits": 8},
    }
    found = {}
    for name, words in plans.items():
        alike = []
        for is_ours in (True, False):
            with applied(make_plan(2, fused_updates=is_ours, **words)):
                asks = None if is_ours else ask_for_it
                alike.append(train(Training(steps=4), rank, asks))
        (ours, weights), (asked, asked_weights) = alike
        same = all(torch.equal(weights[key], asked_weights[key]) for key in weights)
        found[name] = ours == asked, same
        dist.barrier()
    return found


def ask_for_it(ddp, optimizer, step):
    for group in optimizer.param_groups:
        group["fused"] = True


@pytest.mark.timeout(120)
def test_shards_are_updated_so_too():
    for found in run_ranks(sharded, 2):
        assert found == dict.fromkeys(found, (True, True)) and len(found) == 5
