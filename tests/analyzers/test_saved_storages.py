"""What units keep and may move: not what they are called with that needs no gradient."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.run.records import CallTensor, ModuleCall
from tests.make_run import make_run

RUN = make_run(num_ranks=1, sequence=64)
(RANK,) = RUN.ranks
KEPT = next(row for row in RANK.saved if row.unit == "blocks.1" and row.size_bytes >= 2**16)


def movable_bytes(run):
    return sum(one.size_bytes for one in captured_step(run).saved if one.movable_by == (("blocks.1", 0),))


def called_with(needs_gradient, category="activation", module="blocks.1"):
    """The same run, in which a module is called with something that blocks.1 keeps."""
    call = ModuleCall(
        call_id=0,
        module=module,
        unit="blocks.1",
        phase="forward",
        micro_batch=0,
        start_s=KEPT.saved_s,
        end_s=KEPT.saved_s,
    )
    storages = tuple(
        replace(row, category=category) if row.storage_id == KEPT.storage_id else row for row in RANK.storages
    )
    tensors = (CallTensor(0, KEPT.storage_id, "input", False, needs_gradient),)
    return replace(RUN, ranks=(replace(RANK, storages=storages, module_calls=(call,), call_tensors=tensors),))


@pytest.mark.parametrize(
    ("needs_gradient", "category", "module", "stays"),
    [
        (True, "activation", "blocks.1", False),
        (False, "activation", "blocks.1", True),
        (False, "activation", "blocks.1.mlp", False),  # made inside the unit, as a mask of dropout is
        (None, "activation", "blocks.1", False),  # older runs do not say
        (None, "input", "blocks.1", True),
    ],
)
def test_an_argument_without_gradient_stays(needs_gradient, category, module, stays):
    found = movable_bytes(called_with(needs_gradient, category, module))
    assert movable_bytes(RUN) - found == (KEPT.size_bytes if stays else 0)
