"""Which storages shrink with the micro-batch, by their shapes."""

from dataclasses import replace

import pytest

from memadvisor.analyzers.batch_sizes import shrink_batch
from tests.make_run import make_run, storage

SAMPLES, SEQUENCE = 4, 32
(RANK,) = make_run(num_ranks=1, micro_batch_size=SAMPLES, sequence=SEQUENCE, vocabulary=512).ranks


@pytest.mark.parametrize(
    ("shape", "shrinks"),
    [
        ([SAMPLES, 7], True),
        ([7, SAMPLES], True),
        ([SAMPLES * SEQUENCE, 512], True),
        ([SAMPLES * (SEQUENCE - 1), 512], True),  # the logits of a loss whose labels are shifted by one
        ([SAMPLES * (SEQUENCE + 1), 512], False),
        ([512, 7], False),
        ([7, 7, SAMPLES], False),
    ],
)
def test_what_has_the_batch_in_its_shape_shrinks_with_it(shape, shrinks):
    row = storage(storage_id=10**6, shape=str(shape), size_bytes=4096, category="temporary", phase="backward")
    rank = replace(RANK, storages=(*RANK.storages, row))

    assert shrink_batch(rank, rank.traced_step, 2).get(10**6) == (2048 if shrinks else None)
