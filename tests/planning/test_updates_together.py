"""Optimizers that update all parameters together (foreach, the default on CUDA): what they allocate for it, unit by unit."""

import pytest
import torch
import torch.nn.functional as F

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_moved_activations import DISK, VOCABULARY, Gpt, recorded


class OneWord(Gpt):
    """So little of it is activations that its peak is in the optimizer step."""

    def loss(self):
        words = torch.randint(VOCABULARY, (1, 1))
        return F.cross_entropy(self(words).flatten(0, 1), words.flatten())


def adamw(*, foreach):
    return lambda parameters: torch.optim.AdamW(parameters, foreach=foreach)


@pytest.mark.parametrize("foreach", [True, False])
def test_what_a_units_update_allocates_is_of_that_unit(foreach):
    """With its state on disk each unit is updated by itself. Of an optimizer that updates all at once, all parameters'
    temporaries were foretold for it."""
    run, losses = recorded(OneWord, 1, False, make_optimizer=adamw(foreach=foreach))
    step = captured_step(run)
    plan = make_plan(1, 0, optimizer_tier="disk")
    predicted = simulate(step, write_schedule(plan, step.units), None, transfers=DISK).peak
    applied, measured_losses = recorded(OneWord, 1, False, plan, adamw(foreach=foreach))

    assert step.updates_together == foreach
    assert measured_losses == losses
    assert predicted.position == "optimizer step"
    measured_bytes = applied.ranks[0].traced_step.peak_allocated_bytes
    assert measured_bytes == pytest.approx(
        predicted.total_bytes, abs=64
    )  # numbers that Python hands to operators
