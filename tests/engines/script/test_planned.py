"""Which of a script's models a plan is for."""

from torch import nn

from memadvisor.engines.script.live import model_fingerprint
from memadvisor.engines.script.planned import PlannedModels
from memadvisor.plan import Plan, PlannedModel


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
