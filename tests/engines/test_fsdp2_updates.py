"""The optimizer of a script with FSDP2 updates one unit after another under a plan: the same values, and the memory that was
predicted."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.engines.apply import apply
from memadvisor.plan import UnitPlan
from memadvisor.plan_file import plan_from_json, plan_to_json
from memadvisor.write_schedule import write_schedule
from tests.engines.fsdp2_loop import TIMES, is_near, on_first, profile_in_turn, traced_peak
from tests.engines.ranks import run_ranks
from tests.engines.test_fsdp2 import Block, Model, loss_of
from tests.engines.trainings import make_plan


class Training:
    """Of so many blocks and so few words that the optimizer's step, of all shards together, is the fullest moment."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.model.blocks.extend(Block() for _ in range(8))
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        is_decayed = {True: [p for p in self.model.parameters() if p.ndim > 1]}
        is_decayed[False] = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": own, "weight_decay": 0.1 * decays} for decays, own in is_decayed.items()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=True)
        self.data = torch.Generator().manual_seed(rank)

    def losses(self, num_steps: int) -> list[float]:
        found = []
        for _ in range(num_steps):
            loss = loss_of(self.model, (1, 5), self.data)
            loss.backward()
            found.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found


@dataclass(frozen=True)
class Foreseen:
    """Peaks of a plan that updates units by themselves, which is `plan`, and of one that does not; whether advise has the
    former for a budget between these."""

    by_unit_bytes: int
    at_once_bytes: int
    plan: dict[str, object]
    is_advised: bool


def foreseen(path: Path) -> Foreseen:
    step = captured_step(memadvisor.load(path))
    units = tuple(UnitPlan(name=unit.name, zero_stage=3, recompute=False) for unit in step.units)
    at_once = make_plan(2, 3, "chosen", units, executor="fsdp2", gather_depth=1)
    plans = replace(at_once, update_by_unit=True), at_once
    peaks = [simulate(step, write_schedule(plan, step.units), TIMES).peak.total_bytes for plan in plans]
    best = memadvisor.advise(path, memory=peaks[0] + 1000).best
    return Foreseen(*peaks, plan_to_json(plans[0]), best is not None and best.update_by_unit)


def loop(rank: int, folder: str) -> dict[str, object]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    plain, planned = Training(rank), Training(rank)
    losses: list[float] = []

    def profiled(name: str) -> int:
        path = Path(folder) / name
        with profile_in_turn(rank, path):
            losses.extend(planned.losses(4))
        dist.barrier()
        return on_first(rank, lambda: traced_peak(path, 0))

    peaks = {"plain": [profiled("plain")]}
    ahead = on_first(rank, lambda: foreseen(Path(folder) / "plain"))
    measured = peaks["by unit"] = []
    while len(measured) < 3 and not any(is_near(ahead.by_unit_bytes, peak) for peak in measured):
        applied = apply(plan_from_json(ahead.plan, "a plan"), planned.model, planned.optimizer)
        measured.append(profiled(f"by-unit-{len(measured)}"))
        applied.remove()
    applied = apply(make_plan(2, 0, update_by_unit=True), planned.model, planned.optimizer)
    losses.extend(planned.losses(2))
    applied.remove()
    return {"losses": losses == plain.losses(len(losses)), "ahead": ahead, "peaks": peaks}


@pytest.mark.timeout(200)
def test_units_are_updated_one_after_another_as_all_at_once_and_take_what_was_predicted(tmp_path):
    """One by hand that asks for no stage leaves FSDP2 as it is, and computes the same."""
    for found in run_ranks(loop, 2, str(tmp_path), timeout_s=180):
        ahead, peaks = found["ahead"], found["peaks"]
        assert found["losses"]
        assert ahead.is_advised
        assert ahead.by_unit_bytes < 0.95 * ahead.at_once_bytes
        assert any(is_near(ahead.at_once_bytes, peak) for peak in peaks["plain"])
        assert any(is_near(ahead.by_unit_bytes, peak) for peak in peaks["by unit"]), (ahead, peaks)
