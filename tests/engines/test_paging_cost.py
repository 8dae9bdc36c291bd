import os
from collections import Counter

import pytest
import torch

from memadvisor.engines import paging_cost
from memadvisor.engines.apply import apply
from memadvisor.engines.cost_fit import make_blocks
from memadvisor.engines.lanes.disk import DiskFile
from memadvisor.errors import MemadvisorError


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is measured beside a GPU")
def test_a_machine_that_has_too_much_to_do_is_told_from_one_that_cannot(monkeypatch):
    monkeypatch.setattr(paging_cost, "LIMIT_S", 0.1)
    with pytest.raises(MemadvisorError, match="parameters on disk in 120 s") as late:
        paging_cost.measure_paging_cost()
    assert late.value.hint == "measure when the machine has less to do."

    monkeypatch.setattr(paging_cost, "LIMIT_S", 60.0)
    monkeypatch.setattr(paging_cost, "_main", os.path.exists)  # ends, and leaves nothing
    with pytest.raises(MemadvisorError, match="parameters on disk") as failed:
        paging_cost.measure_paging_cost()
    assert str(failed.value).endswith("on disk.") and "doctor" in failed.value.hint
