"""What a script captures into a CUDA graph, no plan touches; no GPU is needed to see that."""

import pytest
import torch
from torch import nn

from memadvisor.engines.script.live import check_shardable
from memadvisor.errors import PlanError
from tests.engines.trainings import Model, applied, make_plan


def test_a_forward_that_is_captured_is_refused(monkeypatch):
    monkeypatch.setattr("memadvisor.engines.activations.unit_forwards.is_capturing", lambda: True)
    with (
        applied(make_plan(1, policy="every-layer")),
        pytest.raises(PlanError, match="captures into a CUDA graph"),
    ):
        Model()(torch.zeros(2, 5, dtype=torch.long))


def test_parameters_that_a_replayed_forward_reads_stay_where_they_are():
    def replay(*args):
        return args

    replay.__module__ = torch.cuda.make_graphed_callables.__module__  # where torch defines its own
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].forward = replay
    check_shardable(model, 0)
    for stage in (1, 2, 3):
        with pytest.raises(PlanError, match="'1' replays a CUDA graph"):
            check_shardable(model, stage)
