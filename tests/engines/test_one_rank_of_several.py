"""Scripts of several ranks, of which one alone is started (`torchrun --nproc-per-node 1`): what theirs leaves in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.cost.transfers import TransferTimes
from memadvisor.hardware.hardware import TierBandwidth
from memadvisor.plan import UnitPlan
from memadvisor.planning.paging import nearest_tier
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.engines.ranks import run_ranks
from tests.engines.trainings import applied, make_plan

TIMES = TransferTimes({Lane.DISK: TierBandwidth(read_bytes_per_s=1e9, write_bytes_per_s=1e9)}, "a test")


def train(wrapped, run):
    optimizer = torch.optim.Adam(wrapped.parameters(), foreach=False)
    with memadvisor.profile(run):
        for _ in range(5):
            wrapped(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return captured_step(memadvisor.load(run))


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))


def on_disk(step):
    units = tuple(
        UnitPlan(name=u.name, zero_stage=0, recompute=False, optimizer_tier="disk") for u in step.units
    )
    return make_plan(1, 0, "chosen", units)


def ddp(rank, folder, is_view):
    step = train(DistributedDataParallel(model(), gradient_as_bucket_view=is_view), Path(folder) / "plain")
    plan = on_disk(step)
    with applied(plan):
        planned = train(
            DistributedDataParallel(model(), gradient_as_bucket_view=is_view), Path(folder) / "planned"
        )
    predicted = simulate(step, write_schedule(plan, step.units), None, transfers=TIMES).peak_bytes
    return predicted, planned.peak_bytes, step.peak_bytes


def fsdp2(rank, folder):
    mesh = init_device_mesh("cpu", (1,))

    def shared():
        whole = model()
        for block in whole:
            fully_shard(block, mesh=mesh)
        return fully_shard(whole, mesh=mesh)

    step = train(shared(), Path(folder) / "plain")
    plan = on_disk(step)
    with applied(plan):
        planned = train(shared(), Path(folder) / "planned")
    return nearest_tier(step, TIMES), planned.peak_bytes, step.peak_bytes


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_view", [False, True])
def test_ddps_buckets_stay_where_one_rank_keeps_its_optimizers_state_elsewhere(tmp_path, is_view):
    """Nobody takes its reducer's place then. They were left out of the prediction: 13 % too low of a GPT on an H200."""
    [(predicted_bytes, measured_bytes, plain_bytes)] = run_ranks(ddp, 1, str(tmp_path), is_view)

    # One bias's gradient, by when it is added.
    assert predicted_bytes == pytest.approx(measured_bytes, rel=3e-4)
    assert measured_bytes < plain_bytes


@pytest.mark.timeout(120)
def test_states_of_the_scripts_fsdp2_lie_elsewhere_on_one_rank_by_hand_alone(tmp_path):
    """What it holds there is not played, so no plan is made of it."""
    [(tier, measured_bytes, plain_bytes)] = run_ranks(fsdp2, 1, str(tmp_path))

    assert tier is None
    assert measured_bytes < plain_bytes
