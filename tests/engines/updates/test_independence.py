"""Which optimizers update each parameter by itself, found out without a trace in the script."""

from __future__ import annotations

import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from memadvisor.engines.updates.independence import check_independent, why_not_shared_out
from memadvisor.errors import PlanError
from tests.engines import optimizers


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Conv2d(4, 3, 2))


def matrices(found: nn.Module) -> list[nn.Parameter]:
    return [p for p in found.parameters() if p.dim() == 2]


INDEPENDENT = {
    "Muon": lambda m: optim.Muon(matrices(m), lr=0.02),
    "Adafactor": lambda m: optim.Adafactor(m.parameters()),
    "Adafactor, foreach": lambda m: optim.Adafactor(m.parameters(), foreach=True),
    "Lamb": lambda m: optimizers.Lamb(m.parameters()),
    "Shampoo": lambda m: optimizers.Shampoo(m.parameters()),
    "groups": lambda m: optimizers.Counting([{"params": matrices(m), "lr": 0.1}, {"params": [m[0].bias]}]),
    "state of its own": lambda m: optimizers.Built(m.parameters()),
    "AdamW in a class of its own": lambda m: type("Mine", (optim.AdamW,), {"step": _own_step})(
        m.parameters(), foreach=True
    ),
    "not put to work yet": lambda m: optimizers.ScheduleFree(m.parameters()),
    "named": lambda m: optimizers.Lamb(list(m.named_parameters())),
    "lr as a tensor": lambda m: optimizers.Counting(m.parameters(), lr=torch.tensor(0.1)),
}


def _own_step(self, closure=None):
    return optim.AdamW.step(self, closure)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_updates_by_a_parameters_own_gradient_are_found(name):
    assert check_independent(INDEPENDENT[name](model()))


COUPLED = {
    "LBFGS": (optim.LBFGS, "one line for all parameters"),
    "GlobalNorm": (optimizers.GlobalNorm, "by more than that parameter's own gradient"),
    "Prodigal": (optimizers.Prodigal, "by more than"),
    "NotesItsParameters": (optimizers.NotesItsParameters, "keeps for a whole group"),
    "SkipsInfinity": (optimizers.SkipsInfinity, "by more than"),
    "Noisy": (optimizers.Noisy, "by more than"),
    "KeepsItsParameters": (optimizers.KeepsItsParameters, "holds parameters beside its param_groups"),
    "Wrapper": (optimizers.Wrapper, "holds a SGD of its own"),
    "NeedsParameters": (optimizers.NeedsParameters, "fails where a rank has no parameter of a group"),
    "Averaging": (optimizers.Averaging, "its eval() changes parameters outside of its step"),
    "Raising": (optimizers.Raising, "ValueError: this one)"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_updates_that_look_at_other_parameters_are_refused_in_one_line(name):
    kind, text = COUPLED[name]
    with pytest.raises(PlanError) as told:
        check_independent(kind(model().parameters()))
    line = told.value.one_line()
    assert name in line and text in line and "use --zero 0" in line and "\n" not in line


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_a_warm_up_that_begins_at_a_learning_rate_of_nothing_hides_nothing(lr):
    """No parameter changed, so nothing looked at another one, and ranks would have trained apart from the second step on."""
    with pytest.raises(PlanError, match="by more than that parameter's own gradient"):
        check_independent(optimizers.Normalized(model().parameters(), lr=lr))


def test_a_closure_that_is_called_twice_is_found():
    assert not check_independent(optimizers.Sharpness(model().parameters()))


def test_the_script_notices_nothing(capsys):
    class Loud(optimizers.Lamb):
        def update(self, p, gradient, state, group):
            print("loud", random.random(), np.random.rand(), torch.rand(1))
            super().update(p, gradient, state, group)

    found = model()
    optimizer = Loud(found.parameters())
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("own"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    try:
        states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
        before = {name: value.clone() for name, value in found.state_dict().items()}
        check_independent(optimizer)
        assert states == [
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        ]
        assert calls == [] and not optimizer.state and scheduler.last_epoch == 0
        assert all(torch.equal(before[name], value) for name, value in found.state_dict().items())
        assert capsys.readouterr() == ("", "")
        for p in found.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert calls == ["own", "global"]
    finally:
        handle.remove()


def test_what_the_script_does_meanwhile_goes_on(capsys, recwarn):
    """Another thread of its own prints, and warnings that were shown once are not shown again."""

    def warn():
        warnings.warn_explicit("said once", UserWarning, "script.py", 1, registry=registry)

    def prints():
        print("a thread's own")

    class Prints(optimizers.Lamb):
        def update(self, p, gradient, state, group):
            thread = threading.Thread(target=prints)
            thread.start()
            thread.join()
            warnings.warn("the optimizer's own", stacklevel=1)
            super().update(p, gradient, state, group)

    registry = {}
    warnings.simplefilter("default")
    warn()
    filters = list(warnings.filters)
    check_independent(Prints(model().parameters()))
    warn()

    assert [str(each.message) for each in recwarn] == ["said once"]
    assert warnings.filters == filters
    assert set(capsys.readouterr().out.splitlines()) == {"a thread's own"}


def test_an_onlooker_is_told_in_a_sentence_why_an_optimizer_is_not_shared_out():
    assert why_not_shared_out(optim.AdamW(model().parameters())) is None
    assert why_not_shared_out(optim.Adafactor(model().parameters())) is None
    said = why_not_shared_out(optim.LBFGS(model().parameters()))
    assert said == "LBFGS searches along one line for all parameters, which ZeRO shares out."


def test_an_onlooker_runs_no_code_of_the_scripts_own():
    calls = []

    class Counts(optimizers.Prodigal):
        def step(self, closure=None):
            calls.append(self)
            return super().step(closure)

    assert why_not_shared_out(Counts(model().parameters())) is None and not calls
    with pytest.raises(PlanError):
        check_independent(Counts(model().parameters()))
    assert calls
