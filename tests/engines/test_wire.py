"""Shards travel to the same result whichever way is taken."""

from __future__ import annotations

import torch
import torch.distributed as dist

from memadvisor.engines.wire import Wire
from tests.engines.ranks import run_ranks


def travelled(rank: int, num_ranks: int) -> dict[str, bool]:
    found = {}
    for way in ("pairwise", "native", "staged"):
        staged: list[int] = []
        wire = Wire(dist.group.WORLD, lambda tensor, staged=staged: staged.append(tensor.numel()))
        wire.way = lambda tensor, way=way: way
        full = torch.arange(4.0 * num_ranks) * (rank + 1)
        mean = torch.arange(4.0 * num_ranks) * (num_ranks + 1) / 2
        own = wire.reduce_scatter_mean(full.clone())
        found[f"{way} reduce"] = torch.allclose(own, mean.chunk(num_ranks)[rank])
        apart = torch.zeros(4 * num_ranks)
        wire.gather(apart, mean.chunk(num_ranks)[rank].clone())
        found[f"{way} gather"] = torch.equal(apart, mean)
        within = torch.zeros(4 * num_ranks)
        shard = within.chunk(num_ranks)[rank]
        shard.copy_(mean.chunk(num_ranks)[rank])
        wire.gather(within, shard)
        found[f"{way} gather in place"] = torch.equal(within, mean)
        found[f"{way} staging"] = staged == ([] if way == "staged" else [4])
    return found


def test_every_way_gives_the_same():
    for num_ranks in (2, 3):
        for found in run_ranks(travelled, num_ranks, num_ranks, timeout_s=40):
            assert all(found.values()), found
