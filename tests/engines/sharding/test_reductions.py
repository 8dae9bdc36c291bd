"""Steps on gradients that DDP was told not to average."""

import contextlib

import pytest
import torch

from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_plan

ZEROS = torch.zeros(2, 3, dtype=torch.long)


def warnings(rank: int, stage: int, synced: tuple[bool, ...]) -> list[str]:
    """What is said of three steps whose micro-batches are inside or outside of no_sync."""
    said = []
    with applied(
        make_plan(2, stage), note=lambda level, text: said.append(text) if level == "warning" else None
    ):
        ddp = build(Training(), rank)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(3):
            for is_synced in synced:
                with contextlib.nullcontext() if is_synced else ddp.no_sync():
                    ddp(ZEROS).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return said


@pytest.mark.parametrize(
    ("stage", "synced", "num_told"),
    [(1, (False,), 1), (2, (True, False), 1), (0, (False,), 0), (1, (False, True), 0), (3, (True,), 0)],
)
def test_steps_of_ranks_that_part_are_said_to_differ_once(stage, synced, num_told):
    for told in run_ranks(warnings, 2, stage, synced):
        assert len(told) == num_told
        assert all("(no_sync), as local SGD does" in text for text in told)
