"""Parts of units that run again by themselves: predicted from the plain run, applied, and measured to the byte."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.engines.apply import apply
from memadvisor.plan import UnitPlan
from memadvisor.planning.advise import advise
from memadvisor.write_schedule import write_schedule
from tests.analyzers.checkpointed import Gpt
from tests.engines.trainings import make_plan


class Convolutions(nn.Module):
    """Blocks whose last part is a single layer, and whose layers keep statistics and work in place."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(inplace=True)),
                *(nn.Conv2d(24, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU()),
                nn.Conv2d(24, 12, 1),
            )
            for _ in range(3)
        )

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return x.mean((2, 3))


class Normed(nn.Module):
    """Blocks that are highest in the backward of a layer behind a norm of the same part."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
                *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)),
                *(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)),
            )
            for _ in range(3)
        )

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = torch.cat([x, block(x)], 1)[:, ::2].contiguous()
        return x.mean((2, 3))


class Casting(Gpt):
    """Autocast's cache holds copies of weights until it ends; what runs again makes its own."""

    def forward(self, tokens):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens)


KINDS = {
    "gpt": (
        lambda: Gpt(dim=32, layers=5, vocabulary=16, length=64, dropout=0.1),
        lambda: torch.randint(0, 16, (8, 64)),
    ),
    "casting": (
        lambda: Casting(dim=32, layers=4, vocabulary=16, length=32, dropout=0.1),
        lambda: torch.randint(0, 16, (4, 32)),
    ),
    "convolutions": (Convolutions, lambda: torch.randn(4, 3, 24, 24)),
}


def recorded(directory, kind, plan=None, num_micro_batches=2):
    gc.collect()
    make, batch = KINDS[kind]
    torch.manual_seed(1)
    model = make()
    found = None if plan is None else apply(plan, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    try:
        with memadvisor.profile(directory, trace_step=1):
            for _ in range(4):
                for _ in range(num_micro_batches):
                    loss = model(batch()).square().mean()
                    loss.backward()
                    losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if found is not None:
            found.remove()
    return memadvisor.load(directory), losses


@pytest.fixture(scope="module", params=sorted(KINDS))
def plain(request, tmp_path_factory):
    return request.param, *recorded(tmp_path_factory.mktemp("plain") / "run", request.param)


def peak_of(run):
    return run.ranks[0].traced_step.peak_allocated_bytes


@pytest.mark.parametrize("recomputed", [(), (0, 1, 2), (1,)])
def test_peaks_are_those_predicted_whether_units_run_again_or_not(plain, recomputed, tmp_path):
    kind, run, losses = plain
    step = captured_step(run)
    again = {f"blocks.{number}" for number in recomputed}
    options = {
        unit: found.lower[-1].modules for (unit, micro_batch), found in step.parted.items() if not micro_batch
    }
    assert {"blocks.0", "blocks.1", "blocks.2"} <= options.keys()
    units = tuple(
        UnitPlan(name=u.name, zero_stage=0, recompute=u.name in again, parts=options.get(u.name, ()))
        for u in step.units
    )
    plan = make_plan(1, policy="chosen", units=units)
    predicted = simulate(step, write_schedule(plan, step.units), None).prediction()
    ours, losses_ours = recorded(tmp_path / "run", kind, plan)

    assert losses_ours == losses
    # A layer's backward lets go of its copies of running statistics, which are taken to be there throughout.
    assert 0 <= predicted.peak_bytes - peak_of(ours) <= (600 if kind == "convolutions" else 0)


def test_what_a_norm_saves_of_its_statistics_in_a_second_run_is_there_until_its_own_backward(
    tmp_path, monkeypatch
):
    """Copies of them, beside those for putting them back: without these the peak was predicted 128 bytes too low."""
    monkeypatch.setitem(KINDS, "normed", (Normed, lambda: torch.randn(4, 3, 24, 24)))
    run, losses = recorded(tmp_path / "plain", "normed")
    step = captured_step(run)
    parts = {
        unit: [m for o in found.lower for m in o.modules if len(m) == 4]
        for (unit, _), found in step.parted.items()
    }
    units = tuple(
        UnitPlan(name=u.name, zero_stage=0, recompute=False, parts=tuple(parts.get(u.name, ())[:1]))
        for u in step.units
    )
    plan = make_plan(1, policy="chosen", units=units)
    predicted = simulate(step, write_schedule(plan, step.units), None).prediction()
    ours, losses_ours = recorded(tmp_path / "run", "normed", plan)

    assert losses_ours == losses
    assert peak_of(ours) == predicted.peak_bytes


def test_a_budget_below_what_whole_units_need_is_met(plain, tmp_path):
    kind, run, losses = plain
    alone = [p for p in advise(run, memory_bytes=1).plans if not p.changes_script]
    # Where nothing fits what needs least is shown first, and runs parts again.
    assert any(unit.parts for unit in alone[0].plan.units)
    whole = next(p for p in alone if not any(unit.parts for unit in p.plan.units))
    needed = whole.prediction.peak_bytes
    advice = advise(run, memory_bytes=needed - 1)
    ranked = next(ranked for ranked in advice.plans if ranked.fits and not ranked.changes_script)
    ours, losses_ours = recorded(tmp_path / "run", kind, ranked.plan)

    assert any(unit.parts for unit in ranked.plan.units)
    assert "runs parts of" in ranked.plan.why
    assert losses_ours == losses
    assert peak_of(ours) <= needed - 1
    assert advice.smallest_budget_bytes < needed
    # What is not needed is not done.
    step = captured_step(run)
    for place, unit in enumerate(ranked.plan.units):
        without = (*ranked.plan.units[:place], replace(unit, parts=()), *ranked.plan.units[place + 1 :])
        fewer = replace(ranked.plan, units=without)
        if unit.parts:
            assert simulate(step, write_schedule(fewer, step.units), None).peak_bytes >= needed
