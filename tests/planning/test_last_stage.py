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


class Replaced(Fitted):
    """Weights are moved, and moved back by giving parameters the copies of before, as sharpness-aware updates do."""

    def loss(self):
        with torch.no_grad():
            for parameter in self.parameters():
                before = parameter.data.clone()
                parameter.add_(0.01)
                parameter.data = before
        return super().loss()


def test_parameters_that_are_given_other_memory_in_each_step_have_no_stages():
    """They have it beside the engine's, and a prediction would know of one alone."""
    run, _ = recorded(Replaced, 1, bf16=False)
    step = captured_step(run)
    assert last_stage(run, step) == 0
    [note] = stage_notes(run, step, 2)
    assert "p.data = ..." in note


def test_such_parameters_are_the_allocators_as_others_are():
    """They were let go of in the step, and so were none of the allocator's: peaks were predicted without them."""
    run, _ = recorded(Replaced, 1, bf16=False)
    states = captured_step(run).states.values()
    assert sum(each.parameter_bytes for each in states) > 0
    assert [each.mapped_bytes for each in states] == [0] * len(states)


def test_any_other_loss_may_have_stage_3():
    run, _ = recorded(Fitted, 1, bf16=False)
    step = captured_step(run)
    assert last_stage(run, step) == 3
    assert not list(stage_notes(run, step, 2))
