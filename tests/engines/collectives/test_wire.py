"""Shards travel to the same result whichever way is taken."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from memadvisor.engines.collectives import groups
from memadvisor.engines.collectives.groups import _timeout_of
from memadvisor.engines.collectives.wire import Wire
from tests.engines.ranks import run_ranks


def travelled(rank: int, num_ranks: int) -> dict[str, bool]:
    found = {}
    for way in ("pairwise", "native", "staged"):
        staged: list[int] = []
        wire = Wire(dist.group.WORLD, lambda tensor, staged=staged: staged.append(tensor.numel()))
        wire.way = lambda tensor, way=way: way
        full = torch.arange(4.0 * num_ranks) * (rank + 1)
        total = torch.arange(4.0 * num_ranks) * num_ranks * (num_ranks + 1) / 2
        own = wire.reduce_scatter(full.clone())
        found[f"{way} reduce"] = torch.allclose(own, total.chunk(num_ranks)[rank])
        found[f"{way} staging"] = staged == ([] if way == "staged" else [4])
        apart = torch.zeros(4 * num_ranks)
        wire.gather(apart, total.chunk(num_ranks)[rank].clone())
        found[f"{way} gather"] = torch.equal(apart, total)
        within = torch.zeros(4 * num_ranks)
        shard = within.chunk(num_ranks)[rank]
        shard.copy_(total.chunk(num_ranks)[rank])
        wire.gather(within, shard)
        found[f"{way} gather in place"] = torch.equal(within, total)
        found |= begun_together(wire, way, total, rank)
    return found


def begun_together(wire: Wire, way: str, total: torch.Tensor, rank: int) -> dict[str, bool]:
    """Two reductions and two gathers are under way at once, and are waited for in another order."""
    num_ranks = wire.num_ranks
    fulls = [torch.arange(4.0 * num_ranks) * (rank + 1) * scale for scale in (1, 10)]
    targets = [torch.zeros(4 * num_ranks) for _ in fulls]
    shards = [(total * scale).chunk(num_ranks)[rank].clone() for scale in (1, 10)]
    gathers = [wire.begin_gather(targets[0], shards[0], "", 0)]
    reductions = [wire.begin_reduce_scatter(full, "", number) for number, full in enumerate(fulls)]
    gathers.append(wire.begin_gather(targets[1], shards[1], "", 1))
    gathers[1].wait()
    owns = [reduction.wait() for reduction in reversed(reductions)]
    gathers[0].wait()
    return {
        f"{way} reductions together": all(
            torch.allclose(own, shard) for own, shard in zip(owns, reversed(shards), strict=True)
        ),
        f"{way} gathers together": torch.equal(targets[0], total) and torch.equal(targets[1], 10 * total),
    }


def test_every_way_gives_the_same():
    for num_ranks in (2, 3):
        for found in run_ranks(travelled, num_ranks, num_ranks, timeout_s=40):
            assert all(found.values()), found


def numbers(rank: int) -> dict[str, object]:
    """What the ranks agree on where the group takes nothing from the host's memory, as NCCL's does not."""
    with mock.patch.object(groups, "sends_from_host", lambda group: False):
        first = Wire(dist.group.WORLD, lambda tensor: None)
        found = {"largest": first.largest([rank, -rank]), "broadcast": first.broadcast([10 * rank + 1])}
        own = first._host
        first.close()
        second = Wire(dist.group.WORLD, lambda tensor: None)
        second.largest([rank])
        return found | {
            "is another group": own is not dist.group.WORLD and dist.get_world_size(own) == 2,
            "is used again": second._host is own,
            "has a time limit": own is not None and _timeout_of(own) == _timeout_of(dist.group.WORLD),
        }


def test_numbers_of_the_host_go_by_way_of_the_host():
    for found in run_ranks(numbers, 2, timeout_s=40):
        assert found.pop("largest") == [1, 0]
        assert found.pop("broadcast") == [1]
        assert all(found.values()), found
