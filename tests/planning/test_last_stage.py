"""Up to which ZeRO stage plans go, by what the traced step shows of the script."""

import torch

from memadvisor.analyzers.segments import captured_step
from memadvisor.planning.last_stage import last_stage, stage_notes
from tests.analyzers.test_derivatives import Potential
from tests.planning.test_derivatives import Penalised
from tests.planning.test_moved_activations import recorded


class Fitted(Potential):
    def loss(self):
        return self(torch.rand(64, 3)).square().mean()


def test_a_loss_made_of_a_derivative_has_no_plan_of_stage_3():
    """`run` refuses it: the derivative's graph keeps parameters, which stage 3 would free."""
    run, _ = recorded(Penalised, 1, bf16=False)
    step = captured_step(run)
    assert last_stage(run, step) == 2
    [note] = stage_notes(run, step, 2)
    assert "create_graph=True" in note


def test_any_other_loss_may_have_stage_3():
    run, _ = recorded(Fitted, 1, bf16=False)
    step = captured_step(run)
    assert last_stage(run, step) == 3
    assert not list(stage_notes(run, step, 2))
