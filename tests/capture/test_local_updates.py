"""Updates on gradients that DistributedDataParallel was told not to average are seen, whose ever they are."""

import contextlib

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from memadvisor.capture.local_updates import LocalUpdates
from tests.engines.ranks import run_ranks


def seen(rank: int, words: tuple[str, ...]) -> list[bool]:
    """Of two models, of which the first alone is called by `words`, each: inside no_sync, outside, or without gradients."""
    models = [DistributedDataParallel(torch.nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for word in words:
        with models[0].no_sync() if word == "local" else contextlib.nullcontext():
            models[0](torch.ones(2, 4)).sum().backward()
    return [LocalUpdates().has(optimizer) for optimizer in optimizers]


@pytest.mark.parametrize(
    ("words", "is_local"),
    [(("local",), True), (("local", "average"), False), (("average", "local"), True), ((), False)],
)
def test_an_update_is_local_where_the_last_call_was_inside_no_sync(words, is_local):
    for found in run_ranks(seen, 2, words):
        assert found == [is_local, False]
