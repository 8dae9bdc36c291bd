from collections import Counter

import pytest
import torch

from memadvisor.engines import paging_cost
from memadvisor.engines.apply import apply
from memadvisor.engines.cost_fit import make_blocks
from memadvisor.engines.lanes.disk import DiskFile


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_activations_are_moved_as_often_as_calibrate_counts_them(monkeypatch, micro_batches):
    moved = Counter()

    def count(name):
        original = getattr(DiskFile, name)

        def counted(self, *arguments, **options):
            moved[name] += 1
            return original(self, *arguments, **options)

        monkeypatch.setattr(DiskFile, name, counted)

    count("write")
    count("read")
    model = make_blocks(3, 2)
    applied = apply(paging_cost._ACTIVATIONS, model)
    paging_cost._step(model, torch.optim.SGD(model.parameters()), micro_batches)
    applied.remove()
    expected = paging_cost._num_moved(3, 2) * micro_batches
    assert moved == {"write": expected, "read": expected}
