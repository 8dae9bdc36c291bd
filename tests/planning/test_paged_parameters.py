"""Parameters and gradients on disk: predicted from the plain run, applied, and measured."""

import pytest
import torch
import torch.nn.functional as F

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import BATCH, DISK, LENGTH, VOCABULARY, Gpt, recorded


class HalfGpt(Gpt):
    """On half of the micro-batch."""

    def loss(self):
        words = torch.randint(VOCABULARY, (BATCH // 2, LENGTH))
        return F.cross_entropy(self(words).flatten(0, 1), words.flatten())


def planned(step, transfers, again, here):
    """Parameters of all units but those `here` on disk; and the peak that is foretold."""
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
    return plan, simulate(step, write_schedule(plan, step.units), None, transfers=DISK).peak.total_bytes


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
    plan, predicted_bytes = planned(step, transfers, again, here)
    applied, measured_losses = recorded(Gpt, 2, False, plan)

    assert measured_losses == losses
    elements_bytes = 4 * len(run.ranks[0].parameters)
    measured_bytes = applied.ranks[0].traced_step.peak_allocated_bytes
    assert predicted_bytes <= measured_bytes <= predicted_bytes + elements_bytes
    assert predicted_bytes < 0.9 * step.peak_bytes


def test_of_a_micro_batch_that_is_split_too():
    """Foretold from a step of one whole micro-batch; the script then takes two halves of it."""
    run, _ = recorded(Gpt, 1, False)
    _, losses = recorded(HalfGpt, 2, False)
    step = captured_step(run, micro_batch_divisor=2, repeats=2)
    plan, predicted_bytes = planned(step, {"overlap": True, "gather_depth": 1}, ("blocks.1",), ("head",))
    applied, measured_losses = recorded(HalfGpt, 2, False, plan)

    assert measured_losses == losses
    elements_bytes = 4 * len(run.ranks[0].parameters)
    measured_bytes = applied.ranks[0].traced_step.peak_allocated_bytes
    assert predicted_bytes <= measured_bytes <= predicted_bytes + elements_bytes
