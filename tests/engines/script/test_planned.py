"""Which of a script's models a plan is for."""

import pytest
import torch
from torch import nn

from memadvisor.engines.script.live import model_fingerprint
from memadvisor.engines.script.planned import PlannedModels, unmet
from memadvisor.errors import PlanError
from memadvisor.plan import Plan, PlannedModel
from tests.engines.trainings import applied, make_plan


def test_models_of_one_fingerprint_are_met_one_by_one_however_often_each_is_called():
    """A pipeline's rank calls its first stage for several micro-batches before its second: the first took both names."""
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    found = model_fingerprint(stages[0])
    models = tuple(PlannedModel(name=name, fingerprint=found, is_trainable=True) for name in ("", "model1"))
    planned = PlannedModels(Plan(num_ranks=1, zero_stage=0, policy="chosen", models=models))

    assert planned.may_be_due(stages[0])
    assert planned.read(stages[0])[0].units[0].name == "0"
    assert not planned.may_be_due(stages[0])
    assert planned.read(stages[1])[0].units[0].name == "model1.0"
    assert planned.is_complete

    planned.expect_again(stages[0])
    assert planned.may_be_due(stages[0])
    assert planned.read(stages[0])[0].units[0].name == "0"


def test_a_model_whose_forward_the_script_calls_itself_is_refused_with_what_to_do():
    """As layers of the forward-forward algorithm do: no hook of torch's sees the model."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with applied(make_plan(1, 0)):
        model.forward(torch.ones(2, 4)).sum().backward()
        with pytest.raises(PlanError) as refused:
            optimizer.step()

    assert "calls the model's forward itself" in str(refused.value)
    assert "as in model(inputs)" in refused.value.hint


def test_parts_of_a_model_that_was_met_are_no_models_though_another_is_still_due():
    """A critic trains before its generator has been called with gradients; its blocks run again, and call their layers."""
    critic, maker = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Sequential(nn.Linear(2, 4))
    named = zip(("", "model1"), (critic, maker), strict=True)
    models = tuple(
        PlannedModel(name=name, fingerprint=model_fingerprint(model), is_trainable=True)
        for name, model in named
    )
    planned = PlannedModels(Plan(num_ranks=1, zero_stage=0, policy="chosen", models=models))
    planned.read(critic)

    assert not planned.may_be_due(critic[0])
    planned.refuse_strangers(torch.optim.SGD(critic.parameters(), lr=0.1))
    assert planned.may_be_due(maker)


def test_a_script_without_ranks_whose_model_nobody_sees_called_is_told_of_that():
    """Of a model that is compiled in place it was said that its parallelism is its own, and that DistributedDataParallel is
    missing, which such a script needs as little as any other (single_process.py)."""
    for num_ranks in (1, 2):
        said = unmet(make_plan(num_ranks, 1 if num_ranks > 1 else 0)).one_line()
        assert "compiles the whole model in place (model.compile())" in said
        assert "DistributedDataParallel" not in said
