from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memadvisor
from memadvisor.capture.ddp_buckets import buckets_among, name_buckets
from tests.engines.ranks import run_ranks


@dataclass
class Block:
    size_bytes: int
    categories: set[str] = field(default_factory=set)
    shape: str = ""


def test_a_bucket_that_the_step_did_not_touch_is_taken_on_its_owners_word():
    assert name_buckets([], [400, 800, 400], 1600) == [400, 400, 800]
    assert name_buckets([], [400, 800], 1199) == []  # the allocator has not handed out as much


def test_what_already_has_a_name_is_no_second_bucket():
    """Gradients that are views of buckets stay gradients; what a collective sent is communication."""
    view, sent, foreign = Block(400, {"gradient"}), Block(800, {"communication"}), Block(800)

    assert name_buckets([foreign, sent, view], [400, 800], 10_000) == []
    assert [view.categories, sent.categories, foreign.categories] == [{"gradient"}, {"communication"}, set()]


def test_a_tensor_that_python_holds_is_a_bucket_only_where_it_is_flat_and_nothing_else_is():
    """A hook in Python is given the bucket; a moving average of a matrix as large is the script's own."""
    matrix, flat, parameter = (
        Block(400, {"other"}, "[10, 10]"),
        Block(400, {"other"}, "[100]"),
        Block(400, {"parameter"}),
    )
    seen = Block(400)

    assert name_buckets([flat, matrix, parameter, seen], [400, 400], 0) == []
    assert (matrix.categories, parameter.categories) == ({"other"}, {"parameter"})
    assert seen.categories == flat.categories == {"communication"}


def test_an_allocators_block_is_a_buckets_by_what_was_asked_for():
    unnamed = {0x100: 400, 0x200: None, 0x300: 400, 0x400: 512}

    assert buckets_among(unnamed, [400, 800]) == [0x100]


def noted(rank: int, folder: str, told: str) -> tuple[list[str], list[int]]:
    """Categories of what is as large as a number for each of 26 parameters, and unexplained bytes."""
    with memadvisor.profile(f"{folder}/run", trace_step=2) as prof:
        ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(5, 5) for _ in range(13)]), **{told: True})
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
        for _ in range(4):
            ddp(torch.ones(3, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = prof.run.ranks[0]
    notes = [row.category for row in run.storages if row.size_bytes == 4 * 26 and row.phase == "baseline"]
    return notes, [row.unexplained_bytes for row in run.residuals]


@pytest.mark.parametrize("told", ["find_unused_parameters", "static_graph"])
def test_what_ddp_notes_of_used_parameters_is_its_own(tmp_path, told):
    """A number for each parameter on the CPU, and one for the other ranks: no plan has either. In a process of its own:
    what profilers of other tests have missed stays in torch's count of a process."""
    [(notes, unexplained)] = run_ranks(noted, 1, str(tmp_path), told)
    assert notes == ["communication"] * 2
    assert all(size == 0 for size in unexplained)
