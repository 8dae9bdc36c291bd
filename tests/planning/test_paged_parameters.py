"""Parameters and gradients on disk: predicted from the plain run, applied, and measured."""

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import DISK, Gpt, recorded


@pytest.mark.parametrize(
    ("transfers", "again", "here"),
    [
        ({"overlap": True, "gather_depth": 1}, ("blocks.1", "blocks.2"), ()),
        ({"gather_depth": 2}, ("blocks.0", "blocks.1", "blocks.2", "blocks.3"), ("head",)),
    ],
)
def test_what_is_read_and_written_is_what_the_simulator_said(transfers, again, here):
    """But for what stands in the place of a parameter that is away: one element. The gradients of two micro-batches are
    added up."""
    run, losses = recorded(Gpt, 2, False)
    step = captured_step(run)
    units = tuple(
        UnitPlan(
            name=unit.name,
            zero_stage=3,
            recompute=unit.name in again,
            optimizer_tier="disk",
            parameter_tier="device" if unit.name in here else "disk",
        )
        for unit in step.units
    )
    plan = make_plan(1, 3, "chosen", units, **transfers)
    predicted_bytes = simulate(step, write_schedule(plan, step.units), None, transfers=DISK).peak.total_bytes
    applied, measured_losses = recorded(Gpt, 2, False, plan)

    assert measured_losses == losses
    elements_bytes = 4 * len(run.ranks[0].parameters)
    measured_bytes = applied.ranks[0].traced_step.peak_allocated_bytes
    assert predicted_bytes <= measured_bytes <= predicted_bytes + elements_bytes
    assert predicted_bytes < 0.9 * step.peak_bytes
