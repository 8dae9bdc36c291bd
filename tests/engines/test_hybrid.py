"""Hybrid sharding: shards inside groups of ranks, sums across them."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from tests.engines.equality import Configuration, check
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan

_MODEL = (("tied", True), ("dropout", 0.3), ("dim", 5))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "configuration",
    [
        Configuration(
            Training(_MODEL, "groups", accumulate=3, no_sync=True, clip=0.3, dtype="float64", steps=8),
            stages=(3, 2, 1, 0),
            removed_at=5,
        ),
        Configuration(
            Training((*_MODEL, ("smooth", True)), "slow sgd", unused=True, steps=20),
            stages=(2, 3, 3),
            overlap=True,
            gather_depth=1,
        ),
        Configuration(
            Training(_MODEL, "Adafactor", dtype="float64", steps=6), stages=(3, 1), overlap=True, removed_at=4
        ),
    ],
    ids=["waiting", "overlapped", "whole tensors"],
)
def test_two_groups_of_two_follow_ddp(configuration: Configuration):
    found = check(Configuration(**{**_fields(configuration), "shard_ranks": 2}), 4)
    assert found["losses"] > 0  # sums are reordered: it was no plain DDP that ran


def _fields(configuration: Configuration):
    return {name: getattr(configuration, name) for name in Configuration.__dataclass_fields__}


def held(rank: int) -> dict[str, object]:
    """What a rank of 2 x 2 holds after three steps, and what it reads by itself."""
    with applied(make_plan(4, 3, overlap=True, gather_depth=1, shard_ranks=2)) as engine:
        ddp = build(Training(model=(("dim", 8),)), rank)
        optimizer = make_optimizer("adamw", ddp)
        for step in range(3):
            words = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(4 * step + rank))
            ddp(words).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        (executor,) = engine._executors
        wire = executor.sharded.wire
        options = wire.across._get_backend(torch.device("cpu")).options
        found = {
            "inside": dist.get_process_group_ranks(wire.group),
            "across": dist.get_process_group_ranks(wire.across),
            "timeout": options._timeout,
            "shards": torch.cat([flat.shard for flat in executor.flats]),
            "elements": sum(flat.padded_numel for flat in executor.flats),
        }
        # A group of the script's own ends, and ours goes on.
        own = dist.new_group([0, 1, 2, 3])
        dist.barrier(group=own)  # else it might end on one rank while another is still connecting
        dist.destroy_process_group(own)
        # By itself, while the others go on to the end of the plan.
        if rank == 3:
            found["weights"] = {name: p.clone() for name, p in ddp.module.state_dict().items()}
            found["states"] = [s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()]
    found["plain"] = {name: p.clone() for name, p in ddp.module.state_dict().items()}
    found["plain states"] = [s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()]
    return found


@pytest.mark.timeout(60)
def test_each_group_holds_everything_once():
    found = run_ranks(held, 4, timeout_s=40)
    assert [(f["inside"], f["across"]) for f in found] == [
        ([0, 1], [0, 2]),
        ([0, 1], [1, 3]),
        ([2, 3], [0, 2]),
        ([2, 3], [1, 3]),
    ]
    assert all(f["timeout"] == datetime.timedelta(minutes=30) for f in found)
    for f, other in ((found[0], found[2]), (found[1], found[3])):
        assert torch.equal(f["shards"], other["shards"])  # replicas never drift apart, not by a bit
        assert f["shards"].numel() == f["elements"] / 2
    alone = found[3]
    assert all(torch.equal(alone["weights"][name], alone["plain"][name]) for name in alone["plain"])
    assert all(map(torch.equal, alone["states"], alone["plain states"]))
