"""Parameters computed with, and gradients summed in, another dtype: bit for bit what it would be by hand."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from memadvisor.errors import PlanError
from memadvisor.plan import UnitPlan
from memadvisor.precision import Precision as P
from tests.engines.ranks import run_ranks
from tests.engines.sharding.test_executor import TRAININGS, _scaled_training, several_forwards_of, units_of
from tests.engines.trainings import (
    Block,
    Training,
    applied,
    build,
    largest_difference,
    make_optimizer,
    make_plan,
    micro_batch_loss,
    train,
)

BF16, FP16 = "bfloat16", "float16"
# Precision, stage, kind of units, gather depth (and overlap of reductions, where it is not 0).
KINDS = [
    (P(reduce_dtype=BF16), 2, "", 0),
    (P(reduce_dtype=BF16), 3, "kept", 1),
    (P(param_dtype=BF16), 3, "", 1),
    (P(param_dtype=BF16, reduce_dtype=BF16), 3, "kept", 2),
    (P(param_dtype=BF16, reduce_dtype=FP16), 3, "", 0),
    (P(param_dtype=FP16, reduce_dtype="float32"), 3, "", 0),
]
NAMES = ("plain", "momentum", "groups, accumulated", "tied", "frozen, zeros kept", "dropout")
NAMES += ("clipped", "checkpointed by the script")


def train_by_hand(training: Training, rank: int, precision: P):
    """Narrow weights in every forward, wide ones at the optimizer, and every gradient rounded for the wire."""
    narrow_dtype, wire_dtype = (
        getattr(torch, name or "float32") for name in (precision.param_dtype, precision.reduce_dtype)
    )
    wide = build(training, rank).module
    narrow = copy.deepcopy(wide).to(narrow_dtype)
    optimizer = make_optimizer(training.optimizer, wide)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(training.steps):
        for _ in range(training.accumulate):
            losses.append(
                micro_batch_loss(training, lambda words: narrow(words).float(), data, use_extra=False)
            )
            for parameter, copied in zip(wide.parameters(), narrow.parameters(), strict=True):
                if copied.grad is not None:
                    mean = mean_of_ranks(copied.grad, wire_dtype).float()
                    parameter.grad = mean if parameter.grad is None else parameter.grad + mean
                    copied.grad = None
        if training.clip is not None:
            losses.append(float(nn.utils.clip_grad_norm_(wide.parameters(), training.clip)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=not training.keep_zeros)
        with torch.no_grad():
            for parameter, copied in zip(wide.parameters(), narrow.parameters(), strict=True):
                copied.copy_(parameter)
    return losses, {name: value.clone() for name, value in wide.state_dict().items()}


def mean_of_ranks(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    share = (gradient.float() / dist.get_world_size()).to(dtype)
    shares = [torch.empty_like(share) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, share)
    return sum(shares[1:], shares[0])


def follow_by_hand(rank: int) -> dict[str, tuple[float, float]]:
    found = {}
    for number, name in enumerate(NAMES):
        training = replace(TRAININGS[name], steps=4)
        for precision, zero, kind, depth in KINDS[number % 3 * 2 : number % 3 * 2 + 2]:
            expected = train_by_hand(training, rank, precision)
            units = units_of(training, kind) if kind else ()
            plan = make_plan(2, zero, units=units, overlap=depth > 0, gather_depth=depth, precision=precision)
            with applied(plan):
                ours = train(training, rank)
            found[f"{name}: {precision} {zero}"] = tuple(map(largest_difference, expected, ours))
    return found


def test_narrow_copies_wide_masters_and_rounded_sums_are_those_made_by_hand():
    """Two ranks add two numbers, in whatever order; clipping's norm alone is summed in another order."""
    for found in run_ranks(follow_by_hand, 2):
        assert len(found) == 2 * len(NAMES)
        for name, (loss, weight) in found.items():
            exact = not name.startswith("clipped")
            assert loss <= (0 if exact else 1e-3), (name, loss)
            assert weight <= (0 if exact else 1.0), (name, weight)


class Chain(nn.Sequential):
    """What FSDP2 can shard too: no parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(13, 10), Block(10, 0.0), Block(10, 0.0), nn.Linear(10, 13))


def _train_chain(model, parameters, rank) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(10):
        for _ in range(2):
            words = torch.randint(0, 13, (4, 6), generator=data)
            loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def beside_fsdp2(rank: int) -> list[tuple[list[float], list[float]]]:
    found = []
    for reduce_dtype in ("float32", BF16):
        torch.manual_seed(7)
        theirs = Chain()
        ours = copy.deepcopy(theirs)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce_dtype), output_dtype=torch.float32
        )
        inside = MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
        for module in theirs:
            fully_shard(module, mp_policy=inside)
        fully_shard(theirs, mp_policy=policy)
        expected = _train_chain(theirs, theirs.parameters(), rank)
        precision = P(param_dtype=BF16, reduce_dtype=reduce_dtype)
        with applied(make_plan(2, 3, overlap=True, gather_depth=1, precision=precision)):
            ddp = DistributedDataParallel(ours)
            found.append((expected, _train_chain(ddp, ddp.parameters(), rank)))
    return found


@pytest.mark.timeout(120)
def test_losses_are_those_of_fsdp2_with_the_same_policy():
    for found in run_ranks(beside_fsdp2, 2):
        for theirs, ours in found:
            assert ours == theirs


def what_is_seen(rank: int) -> dict[str, object]:
    inside, seen, wire = [], {}, []
    plan = make_plan(2, 3, precision=P(param_dtype=BF16, reduce_dtype=FP16))
    with applied(plan) as engine:
        ddp = build(Training(), rank)
        (executor,) = engine._executors
        for name in ("_gather", "_reduce"):
            work = getattr(executor.sharded.wire, name)
            setattr(
                executor.sharded.wire,
                name,
                lambda way, full, *rest, work=work: (wire.append(full.dtype), work(way, full, *rest))[1],
            )
        block = ddp.module.blocks[0].up
        block.register_forward_pre_hook(lambda m, args: inside.extend([m.weight.dtype, args[0].dtype]))
        # The head is not here when the embedding runs, and is of the dtype that the model computes with.
        ddp.module.tokens.register_forward_hook(
            lambda *_: inside.extend([ddp.module.head.weight.dtype, ddp.module.head.weight.element_size()])
        )
        optimizer = make_optimizer("adamw", ddp)
        logits = ddp(torch.arange(6)[None])
        seen["output"] = logits.dtype
        (logits.square().mean() + ddp.module.head.weight.square().mean()).backward()
        weight = ddp.module.head.weight
        seen["gradient"] = weight.grad.dtype, weight.grad.clone().dtype
        optimizer.step()
        seen["rest"] = (
            weight.dtype,
            weight.nbytes // weight.numel(),
            weight.detach().dtype,
            (weight * 1).dtype,
        )
        seen["state"] = {v.dtype for state in optimizer.state.values() for v in state.values()}
        seen["saved"] = {v.dtype for v in ddp.state_dict().values()}
        seen["moments"] = {
            v.dtype for state in optimizer.state_dict()["state"].values() for v in state.values()
        }
        with torch.no_grad():
            weight.mul_(1 + 2**-12)  # of which bfloat16 would see nothing
        saved = weight.detach().clone()
        copied = copy.deepcopy(ddp.module).head.weight
        seen["wire"] = set(wire)
    seen["copy"] = copied.dtype, type(copied) is nn.Parameter
    seen["removed"] = weight.dtype, torch.equal(weight, saved), weight.grad.dtype, weight.grad_dtype
    return {"inside": inside, **seen}


def test_who_sees_which_dtype():
    wide, narrow = torch.float32, torch.bfloat16
    for seen in run_ranks(what_is_seen, 2):
        assert seen == {
            "inside": [narrow, 2, narrow, narrow],
            "wire": {narrow, torch.float16},
            "output": wide,
            "gradient": (wide, wide),
            "rest": (wide, 4, wide, wide),
            "state": {wide},
            "saved": {wide},
            "moments": {wide},
            "copy": (wide, True),
            "removed": (wide, True, wide, wide),
        }


class Renormed(nn.Module):
    """An embedding that changes its own weight in its forward, and a block fed by name with another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5, 8, max_norm=1.0)
        self.blocks = nn.ModuleList(Masked() for _ in range(2))

    def forward(self, words, *, mask):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x, mask=torch.linspace(0, 1, 8)) * mask
        return x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mask):
        return self.linear(x * mask)


def odd_models(rank: int) -> tuple[bool, list[int], str]:
    with applied(make_plan(2, 3, precision=P(param_dtype=BF16))):
        torch.manual_seed(0)
        model = Renormed()
        before = model.tokens.weight.detach().clone()
        ddp = DistributedDataParallel(model)
        ddp(torch.arange(3)[None], mask=torch.ones(8)).sum().backward()
        after = ddp.module.tokens.weight.detach()
        norms = after.norm(dim=1)[:3].tolist()
        kept = torch.equal(
            after[3:], before[3:]
        )  # digits that bfloat16 has not, of rows that were left alone
    try:
        with applied(make_plan(2, 3, precision=P(param_dtype=BF16))):
            DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        refused = ""
    except PlanError as error:
        refused = error.one_line()
    return kept, [round(norm, 1) for norm in norms], refused


def test_inputs_by_name_are_cast_and_what_a_module_writes_is_kept():
    for kept, norms, refused in run_ranks(odd_models, 2):
        assert kept and norms == [1.0] * 3
        assert refused.startswith("'1' keeps running statistics in float32")


def loops(rank: int) -> dict[str, float]:
    """Loops that are written in other ways, beside float32; an optimizer of whole parameters, beside one by hand."""
    scaled_plain, forwards_plain = _scaled_training(rank), several_forwards_of(rank)
    with applied(make_plan(2, 3, precision=P(param_dtype=FP16, reduce_dtype=FP16))):
        scaled = _scaled_training(rank)
    with applied(make_plan(2, 3, precision=P(param_dtype=BF16, reduce_dtype=BF16))):
        forwards = several_forwards_of(rank)
    whole, both = Training(optimizer="Adafactor", steps=4), P(param_dtype=BF16, reduce_dtype=BF16)
    whole_by_hand = train_by_hand(whole, rank, both)[0]
    with applied(make_plan(2, 3, precision=both)):
        whole_found = train(whole, rank)[0]
    return {
        "whole": largest_difference(whole_by_hand, whole_found),
        "scaled": largest_difference(scaled_plain[0], scaled[0]),
        "scales": largest_difference(scaled_plain[1], scaled[1]),
        "forwards": largest_difference(forwards_plain, forwards),
    }


def test_loss_scaling_several_forwards_and_whole_parameters_go_on():
    for found in run_ranks(loops, 2):
        assert found["scales"] == 0 and 0 < found["scaled"] < 0.02, found
        assert 0 < found["forwards"] < 0.02, found
        assert found["whole"] < 1e-3, found


def test_units_that_keep_whole_parameters_refuse_a_parameter_dtype():
    units = (UnitPlan(name="tokens", zero_stage=2, recompute=False),)
    with (
        pytest.raises(PlanError, match="param_dtype bfloat16 with ZeRO stage 2"),
        applied(make_plan(2, 3, units=units, precision=P(param_dtype=BF16))),
    ):
        pass
