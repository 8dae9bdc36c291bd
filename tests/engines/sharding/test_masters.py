"""Models in bfloat16 whose optimizer updates float32 masters: bit for bit what a loop gives that keeps them by hand."""

from __future__ import annotations

import copy
import io
import time
from dataclasses import replace

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn

from memadvisor.engines.script.live import read_model
from memadvisor.plan import UnitPlan
from memadvisor.precision import Precision
from tests.engines.ranks import run_ranks
from tests.engines.sharding.test_executor import TRAININGS
from tests.engines.test_precision import mean_of_ranks
from tests.engines.trainings import (
    Model,
    Training,
    applied,
    build,
    make_optimizer,
    make_plan,
    micro_batch_loss,
    train,
)

MASTERS = Precision(optimizer_dtype="float32")


def updated_by_hand(training: Training, rank: int, stages: dict[str, int]):
    """Weights in bfloat16 in every forward, float32 ones at the optimizer, gradients summed in bfloat16.

    `stages`: of each parameter, by name. Up to stage 1 micro-batches are added up where the script finds them, in
    bfloat16, and in float32 from stage 2 on.
    """
    narrow = build(training, rank).module
    wide = copy.deepcopy(narrow).float()
    optimizer = make_optimizer(training.optimizer, wide)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(training.steps):
        for micro_batch in range(training.accumulate):
            losses.append(micro_batch_loss(training, narrow, data, use_extra=False))
            is_last = micro_batch == training.accumulate - 1
            for (name, parameter), copied in zip(wide.named_parameters(), narrow.parameters(), strict=True):
                if copied.grad is None:
                    continue
                if stages[name] >= 2:
                    mean = mean_of_ranks(copied.grad, torch.bfloat16).float()
                    parameter.grad = mean if parameter.grad is None else parameter.grad + mean
                    copied.grad = None
                elif is_last or not training.no_sync:
                    copied.grad = mean_of_ranks(copied.grad, torch.bfloat16)
        if training.clip is not None:
            losses.append(float(nn.utils.clip_grad_norm_(narrow.parameters(), training.clip)))
        for parameter, copied in zip(wide.parameters(), narrow.parameters(), strict=True):
            parameter.grad = parameter.grad if copied.grad is None else copied.grad.float()
            copied.grad = None
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, copied in zip(wide.parameters(), narrow.parameters(), strict=True):
                copied.copy_(parameter)
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return losses, narrow.state_dict(), optimizer.state_dict()["state"], masters


# Training, stage (None: another one for each unit, from 1 on), updates in the backward. The second has its state on disk.
MASTER_KINDS = [
    ("clipped", 1, False),
    ("no_sync", 1, False),
    ("groups, accumulated", 2, False),
    ("plain", 2, True),
    ("tied", None, False),
    ("frozen, zeros kept", None, False),
    ("groups, accumulated", 3, False),
]


def masters_by_hand(rank: int) -> dict[str, bool]:
    checks = {}
    for number, (name, zero, is_early) in enumerate(MASTER_KINDS):
        training = replace(TRAININGS[name], steps=4, dtype="bfloat16", keep_zeros=False)
        used = []

        def look(ddp, optimizer, step, used=used, is_early=is_early):
            used.append((ddp, optimizer))
            for parameter in () if is_early else ddp.parameters():  # what is left alone keeps its digits
                parameter.data.add_(0), parameter.norm()

        rows = read_model(Model(**dict(training.model))).rows
        each = [UnitPlan(name=row.name, zero_stage=1 + n % 3, recompute=False) for n, row in enumerate(rows)]
        plan = make_plan(
            *(2, zero or 3),
            units=() if zero else tuple(each),
            overlap=number % 2 > 0,
            gather_depth=number % 3,
            precision=MASTERS,
            update_in_backward=is_early,
            optimizer_tier="disk" if number == 1 else "device",
        )
        with applied(plan):
            found, ours = train(training, rank, look)
            ddp, optimizer = used[-1]
            executor = ddp.reducer.executor
            stages = {slot.name: slot.flat.stage for slot in executor.slots}
            stages |= {name: 0 for name, p in ddp.module.named_parameters() if not p.requires_grad}
            kind = f"{number} {name} {zero}"
            checks[f"{kind}: early"] = executor.early.is_off != is_early
            state = copy.deepcopy(optimizer.state_dict()["state"])
            checks[f"{kind}: resumed"] = _resumes(ddp, optimizer, (-1) ** number)
            checks[f"{kind}: written"] = _keeps_what_is_written(ddp, optimizer)
        losses, weights, states, masters = updated_by_hand(training, rank, stages)
        checks[f"{kind}: plain"] = {p.dtype for p in ddp.parameters()} == {torch.bfloat16} and all(
            value.dtype == torch.bfloat16 or key == "step"
            for values in optimizer.state.values()
            for key, value in values.items()
        )
        checks[f"{kind}: losses"] = losses == found
        checks[f"{kind}: weights"] = all(torch.equal(weights[key], ours[key]) for key in weights)
        checks[f"{kind}: dtypes"] = {value.dtype for value in ours.values()} == {torch.bfloat16}
        checks[f"{kind}: states"] = all(
            torch.equal(value, state[key][kind]) for key in states for kind, value in states[key].items()
        )
        checks[f"{kind}: masters"] = any(m.bfloat16().float().ne(m).any() for m in masters) and all(
            torch.equal(state[key]["master"], masters[key]) for key in states
        )
    return checks


def _resumes(ddp, optimizer, order: int) -> bool:
    """Whether a step after loading ends as the same step without; order: which is loaded first, 1 for the model."""
    file, ends = io.BytesIO(), []
    torch.save([ddp.state_dict(), optimizer.state_dict()], file)
    for _ in range(2):
        ddp(torch.arange(6)[None]).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(copy.deepcopy([ddp.state_dict(), optimizer.state_dict()]))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for target, state in list(zip((ddp, optimizer), saved, strict=True))[::order]:
            target.load_state_dict(state)
    states = [[*end[0].values(), *(v for s in end[1]["state"].values() for v in s.values())] for end in ends]
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*states, strict=True))


def _keeps_what_is_written(ddp, optimizer) -> bool:
    """What the script writes becomes the master, on all ranks, and what it leaves alone keeps its digits."""
    parameter = ddp.module.blocks[0].up.weight
    own = [p for group in optimizer.param_groups for p in group["params"]]
    number = next(n for n, p in enumerate(own) if p is parameter)
    before = optimizer.state_dict()["state"][number]["master"].clone()
    if torch.distributed.get_rank() == 0:
        time.sleep(0.1)  # the other rank asks before this one has come by its write
    with torch.no_grad():
        parameter[::2] = 0.125
    after = optimizer.state_dict()["state"][number]["master"]
    return bool((after[::2] == 0.125).all()) and torch.equal(after[1::2], before[1::2])


def test_masters_of_narrow_parameters_are_those_kept_by_hand():
    """Updated in float32, computed with in bfloat16: losses, weights, states and masters in every bit."""
    for checks in run_ranks(masters_by_hand, 2):
        assert len(checks) == 9 * len(MASTER_KINDS) and all(checks.values()), checks


def through_a_checkpoint(rank: int, directory: str) -> dict[str, bool]:
    """Saved in shards by stage 2, read in shards by others, whose next step is the same."""
    training, found = Training(steps=2, dtype="bfloat16"), {}
    ends: list[list[torch.Tensor]] = []
    for zero in (2, 1, 3):
        with applied(make_plan(2, zero, overlap=True, precision=MASTERS)):
            ddp = build(training, rank)
            optimizer, data = make_optimizer("adamw", ddp), torch.Generator().manual_seed(rank)
            for _ in range(3 if zero == 2 else 1):
                micro_batch_loss(training, ddp, data, use_extra=False)
                optimizer.step()
                optimizer.zero_grad()
            state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
            if zero == 2:
                checkpoint.save(state, checkpoint_id=directory)
            else:
                checkpoint.load(state, checkpoint_id=directory)
                optimizer.load_state_dict(state["optimizer"])
                ddp.load_state_dict(state["model"])
            ddp(torch.arange(6)[None]).float().square().sum().backward()
            optimizer.step()
            states = optimizer.state_dict()["state"].values()
            ends.append(
                [p.detach().clone() for p in ddp.parameters()] + [s["master"].clone() for s in states]
            )
        found[f"stage {zero}"] = all(map(torch.equal, ends[0], ends[-1]))
    return found


def test_masters_come_back_from_a_sharded_checkpoint_in_another_stage(tmp_path):
    for found in run_ranks(through_a_checkpoint, 2, str(tmp_path)):
        assert found == {"stage 2": True, "stage 1": True, "stage 3": True}
