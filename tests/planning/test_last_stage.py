"""Up to which ZeRO stage plans go, by what the traced step shows of the script."""

import pytest
import torch

from memadvisor.analyzers.segments import captured_step
from memadvisor.errors import UsageError
from memadvisor.planning.advise import advise
from memadvisor.planning.last_stage import last_stage, stage_notes
from memadvisor.precision import Precision
from tests.analyzers.test_derivatives import Potential
from tests.planning.test_advise import MEASURED
from tests.planning.test_derivatives import Penalised
from tests.planning.test_moved_activations import recorded


class Fitted(Potential):
    def loss(self):
        return self(torch.rand(64, 3)).square().mean()


class Replaced(Fitted):
    """Weights are moved, and moved back by giving parameters the copies of before, as sharpness-aware updates do."""

    def loss(self):
        with torch.no_grad():
            for parameter in self.parameters():
                before = parameter.data.clone()
                parameter.add_(0.01)
                parameter.data = before
        return super().loss()


@pytest.mark.parametrize(
    ("kind", "last", "word"),
    [
        # `run` refuses it: the derivative's graph keeps parameters, which stage 3 would free.
        (Penalised, 2, "create_graph=True"),
        # Parameters have that memory beside the engine's, and a prediction would know of one alone.
        (Replaced, 0, "p.data = ..."),
    ],
)
def test_what_plans_go_up_to_less_than_stage_3_for_is_said(kind, last, word):
    run, _ = recorded(kind, 1, bf16=False)
    step = captured_step(run)
    assert last_stage(run, step) == last
    [note] = stage_notes(run, step, 2)
    assert word in note


def test_what_needs_stages_is_refused_by_what_keeps_plans_from_them():
    run, _ = recorded(Replaced, 1, bf16=False)
    with pytest.raises(UsageError, match=r"needs ZeRO stage 1, 2 or 3\..*p\.data = "):
        advise(
            run,
            memory_bytes=2**30,
            num_ranks=2,
            hardware=MEASURED,
            precision=Precision(reduce_dtype="bfloat16"),
        )


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
