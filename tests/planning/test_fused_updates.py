"""Fused updates: predicted from the plain run, applied, and measured to the byte."""

import gc

import pytest
import torch

import memadvisor
from memadvisor.analyzers.fused_step import fused_seconds
from memadvisor.analyzers.segments import RecordedStep, captured_step
from memadvisor.asked import Asked
from memadvisor.engines.apply import apply
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import OptimizerRate
from tests.planning.test_moved_activations import Gpt

MAKES = {
    "AdamW": lambda parameters, **how: torch.optim.AdamW(parameters, lr=1e-3, **how),
    "foreach": lambda parameters, **how: torch.optim.AdamW(parameters, lr=1e-3, foreach=True, **how),
    "Adam": lambda parameters, **how: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True, **how),
    "SGD": lambda parameters, **how: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True, **how),
}


def recorded(directory, make, plan=None, model=None):
    gc.collect()
    torch.manual_seed(1)
    model = model or Gpt(2)
    optimizer = make(model.parameters())
    found = None if plan is None else apply(plan, model, optimizer)
    try:
        with memadvisor.profile(directory, trace_step=3) as prof:
            for _ in range(5):
                model.loss().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if found is not None:
            found.remove()
    return prof.run


class Stack(torch.nn.Module):
    """Of so small a batch that the update is the fullest moment."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def loss(self):
        return self(torch.ones(2, 64)).square().mean()


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("model", [Gpt, Stack])
def test_the_peak_is_the_predicted_one(model, kind, tmp_path):
    plain = recorded(tmp_path / "plain", MAKES[kind], model=model())
    usual = memadvisor.advise(plain, memory="100%").plans[0].plan
    advice = memadvisor.advise(plain, memory="100%", fused_updates=True)
    plan = advice.plans[0].plan
    assert plan.fused_updates and not usual.fused_updates
    run = recorded(tmp_path / "run", MAKES[kind], plan, model())

    measured_bytes = run.ranks[0].traced_step.peak_allocated_bytes
    assert plan.prediction.peak_bytes == measured_bytes
    assert "fused_updates" not in {change.kind for change in advice.script_changes}
    if model is Stack and kind != "SGD":  # whose foreach adds in place
        named = {change.kind for change in memadvisor.advise(plain, memory="100%").script_changes}
        assert plan.prediction.peak_bytes < usual.prediction.peak_bytes and "fused_updates" in named


def test_no_temporary_of_an_update_is_left(tmp_path):
    plain = recorded(tmp_path / "plain", MAKES["foreach"], model=Stack())
    usual, fused = captured_step(plain), RecordedStep(plain, Asked(fused_updates=True)).captured()

    def temporaries(step):
        at = set(step.optimizer_at)
        return [row for row in step.storages if row.category == "temporary" and row.birth_segment in at]

    assert temporaries(usual) and not temporaries(fused)
    assert usual.updates_together and not fused.updates_together


def test_time_is_that_of_the_bytes_at_the_measured_rate_where_that_is_less(tmp_path):
    plain = recorded(tmp_path / "plain", MAKES["AdamW"], model=Stack())
    num_elements = 4 * (64 * 64 + 64)
    rate = OptimizerRate(optimizer="AdamW", implementation="fused", elements_per_s=1e12)
    # Counts of steps are 4 B a parameter, read and written.
    expected_s = (28 * num_elements + 2 * 4 * 8) / (28 * 1e12)
    assert fused_seconds(plain.ranks[0], [rate]) == pytest.approx(expected_s)
    usual, fast = (
        RecordedStep(plain, Asked(fused_updates=True), optimizer_rates=rates).captured()
        for rates in ((), (rate,))
    )

    def update_s(step):
        return sum(step.segments[place].duration_s for place in step.optimizer_at)

    assert update_s(usual) == pytest.approx(update_s(captured_step(plain)))
    assert update_s(fast) == pytest.approx(expected_s)
    assert usual.step_time_s - fast.step_time_s == pytest.approx(update_s(usual) - expected_s)
    slow = OptimizerRate(optimizer="AdamW", implementation="fused", elements_per_s=1.0)
    assert (
        RecordedStep(plain, Asked(fused_updates=True), optimizer_rates=[slow]).captured().step_time_s
        == usual.step_time_s
    )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.NAdam(p), "NAdam has no fused update"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "tells of no optimizer"),
        (lambda p: torch.optim.AdamW(p, fused=True), "fused already"),
    ],
)
def test_runs_that_no_prediction_is_made_from_are_refused(make, why, tmp_path):
    plain = recorded(tmp_path / "plain", make, model=Stack())
    with pytest.raises(UsageError, match=why):
        memadvisor.advise(plain, memory="100%", fused_updates=True)
