"""Updates one step late: predicted from the plain run, applied, and measured."""

import gc
import tempfile
from pathlib import Path

import pytest
import torch

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.cost.transfers import TransferTimes
from memadvisor.engines.apply import apply
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import UnitPlan
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.make_run import make_run
from tests.planning.test_moved_activations import Gpt


def times(bytes_per_s):
    tier = TierBandwidth(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)
    return TransferTimes({Lane.DISK: tier}, "a test")


def played(step, bytes_per_s=1e9, *, is_delayed=True, tier="disk"):
    units = tuple(
        UnitPlan(name=u.name, zero_stage=0, recompute=False, optimizer_tier=tier) for u in step.units
    )
    plan = make_plan(1, 0, "chosen", units, delayed_update=is_delayed)
    return simulate(step, write_schedule(plan, step.units), None, transfers=times(bytes_per_s)), plan


def recorded(plan):
    gc.collect()  # models of runs before this one that lie in cycles
    torch.manual_seed(1)
    model = Gpt(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = None if plan is None else apply(plan, model)
    with tempfile.TemporaryDirectory() as directory:
        try:
            with memadvisor.profile(Path(directory) / "run", trace_step=3) as prof:
                for _ in range(5):
                    model.loss().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            if found is not None:
                found.remove()
        return prof.run


def test_the_peak_is_never_above_what_is_predicted_and_less_by_what_an_update_allocates_at_most():
    """An update runs at any time of a step, and with it what it allocates beside."""
    step = captured_step(recorded(None))
    predicted, plan = played(step)
    measured = recorded(plan).ranks[0].traced_step.peak_allocated_bytes
    at_once, _ = played(step, is_delayed=False)
    largest = max(p.size_bytes for states in step.states.values() for p in states.parameters)
    assert 0 <= predicted.peak_bytes - measured <= 3 * largest
    assert predicted.peak_bytes > at_once.peak_bytes


def test_a_late_update_takes_time_where_it_is_longer_than_the_step_alone():
    """0.1 s a step, of which the optimizer 0.008."""
    step = captured_step(make_run(num_ranks=1))
    state_bytes = sum(states.optimizer_bytes for states in step.states.values())
    plain, at_once = played(step, tier="device", is_delayed=False)[0], played(step, 1e8, is_delayed=False)[0]
    late = played(step, 1e8)[0]
    rest_s = plain.step_time_s - 0.008
    assert late.step_time_s == pytest.approx(rest_s) and late.exposed_transfer_s == 0
    assert at_once.step_time_s > plain.step_time_s

    slow = played(step, 1e6)[0]
    alone_s = played(step, 1e6, is_delayed=False)[0].step_time_s - rest_s
    assert slow.step_time_s == pytest.approx(alone_s) and alone_s > 2 * state_bytes / 1e6
    assert slow.exposed_transfer_s == pytest.approx(alone_s - rest_s)
