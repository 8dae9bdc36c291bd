"""Compressed messages: trainings go the way of plain ones, ranks stay alike, and what must stay exact does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memadvisor.compression import Compression
from memadvisor.engines.collectives.quantise import rounded
from memadvisor.engines.sharding.feedback import Feedback
from memadvisor.engines.sharding.flat import Flat
from memadvisor.errors import PlanError
from memadvisor.precision import Precision
from tests.engines.ranks import run_ranks
from tests.engines.test_precision import Renormed, _scaled_training
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan

C = Compression
# Compression, stage, further words of the plan.
KINDS = {
    "gathers ahead, bf16": (C(gather_bits=8), 3, {"precision": Precision(param_dtype="bfloat16")}),
    "reductions": (C(reduce_bits=8), 2, {}),
    "1 bit": (C(all_reduce_bits=1), 0, {}),
    "the largest": (C(all_reduce_top=16), 1, {}),
    "low rank": (C(all_reduce_rank=2), 1, {}),
    "reductions behind, both": (C(gather_bits=8, reduce_bits=4), 3, {}),
}
# How much of what the plain training has learnt in the end must have been learnt; and how far any loss may be from the
# plain one's, of the first. What has error feedback sends much of a gradient some steps late, so there the way is not
# compared.
LEARNT, LOSSES = 0.8, 0.05


def learn(rank: int, steps: int = 20) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Next words of a fixed rule, on each rank from other beginnings."""
    training = Training(model=(("dim", 24),))
    ddp = build(training, rank)
    optimizer = make_optimizer("adamw", ddp)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        words = (torch.randint(0, 13, (16, 1), generator=data) + 5 * torch.arange(7)) % 13
        for part in words.chunk(2):
            loss = F.cross_entropy(ddp(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: value.clone() for name, value in ddp.module.state_dict().items()}


def learn_in_all_ways(rank: int) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    found = {"plain": learn(rank)}
    for name, (compression, zero, words) in KINDS.items():
        ahead = "ahead" in name or "behind" in name
        plan = make_plan(2, zero, overlap=ahead, gather_depth=int(ahead), compression=compression, **words)
        with applied(plan):
            found[name] = learn(rank)
    return found


@pytest.mark.timeout(120)
def test_losses_go_the_plain_way_and_weights_are_alike_on_all_ranks():
    first, second = run_ranks(learn_in_all_ways, 2)
    plain = first["plain"][0]
    assert plain[-1] < 0.5 * plain[0]
    for name in KINDS:
        losses, weights = first[name]
        assert losses != plain, name
        assert plain[0] - losses[-1] > LEARNT * (plain[0] - plain[-1]), (name, losses[-1], plain[-1])
        furthest = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
        assert KINDS[name][0].has_feedback or furthest < LOSSES * plain[0], (name, furthest)
        assert all(torch.equal(weights[key], second[name][1][key]) for key in weights), name


def what_is_rounded(rank: int) -> dict[str, bool]:
    """What modules see in training is rounded, and nothing else is."""
    found: dict[str, bool] = {}
    with applied(make_plan(2, 3, compression=C(gather_bits=8))) as engine:
        ddp = build(Training(model=(("dim", 24),)), rank)
        whole = {name: value.clone() for name, value in ddp.state_dict().items()}
        up = ddp.module.blocks[0].up
        (executor,) = engine._executors
        flat = executor.units["blocks.0"].flats[0]
        slot = next(slot for slot in flat.slots if slot.parameter is up.weight)
        seen = []
        up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
        ddp(torch.arange(6)[None]).sum().backward()
        with torch.no_grad():
            ddp.module(torch.arange(6)[None])
        full = flat.new(flat.padded_numel).zero_()
        for other in flat.slots:
            other.view(full).copy_(whole[f"module.{other.name}"])
        expected = torch.cat([rounded(shard, 8) for shard in full.chunk(2)])
        found["training"] = torch.equal(seen[0], slot.view(expected))
        found["evaluation"] = torch.equal(seen[1], whole["module.blocks.0.up.weight"])
        found["state_dict"] = all(torch.equal(whole[key], value) for key, value in ddp.state_dict().items())
    found["removed"] = all(torch.equal(whole[key], value) for key, value in ddp.state_dict().items())
    return found


def writes_of_modules(rank: int) -> list[float]:
    """An embedding that changes rows of its own weight in its forward: the others keep every digit."""
    with applied(make_plan(2, 3, compression=C(gather_bits=8))):
        torch.manual_seed(0)
        model = Renormed()
        before = model.tokens.weight.detach().clone()
        ddp = DistributedDataParallel(model)
        ddp(torch.arange(3)[None], mask=torch.ones(8)).sum().backward()
        after = ddp.module.tokens.weight.detach()
        return [*after.norm(dim=1)[:3].tolist(), float((after[3:] - before[3:]).abs().max())]


def test_shards_stay_exact_and_modules_see_what_was_sent():
    for found in run_ranks(what_is_rounded, 2):
        assert all(found.values()), found
    for *norms, changed in run_ranks(writes_of_modules, 2):
        assert norms == pytest.approx([1.0] * 3, abs=1e-3) and changed == 0


def nothing_is_lost(rank: int) -> dict[str, float]:
    """Of a few steps of made-up gradients: how far what came out and what is left are from the true means."""
    found = {}
    for name, compression in FEEDBACK.items():
        with applied(make_plan(3, 1, compression=compression)) as engine:
            torch.manual_seed(0)
            DistributedDataParallel(nn.Linear(37, 19))
            (executor,) = engine._executors
            (flat,) = executor.flats
            data = torch.Generator().manual_seed(rank)
            out, true = (torch.zeros(flat.num_elements, dtype=torch.float64) for _ in range(2))
            for _ in range(5):
                grad = torch.randn(flat.num_elements, generator=data)
                true += grad
                executor.reductions.feedback.begin_mean(flat, grad).wait()
                out += grad
            seen = [torch.empty_like(grad) for _ in range(3)]
            dist.all_gather(seen, grad)
            left, left_of_sum = _left_over(executor.reductions.feedback, flat)
            whole = torch.zeros(flat.padded_numel, dtype=torch.float64)
            whole[: flat.num_elements] = left - true / 3
            flat.own_slice(whole).add_(left_of_sum)
            dist.all_reduce(whole)
            missing = whole[: flat.num_elements] + out
            found[name] = float(missing.abs().max())
            found[f"{name}: alike"] = float(not all(torch.equal(seen[0], other) for other in seen))
            found[f"{name}: nothing left"] = float(left.abs().max() == 0)
            executor.reductions.feedback.begin_mean(flat, grad.fill_(float("inf"))).wait()
            found[f"{name}: infinity"] = float(bool(grad.isfinite().all()))
            executor.reductions.feedback.begin_mean(flat, grad.fill_(1.0)).wait()
            found[f"{name}: infinity stays"] = float(not bool(grad.isfinite().all()))
    return found


def _left_over(feedback: Feedback, flat: Flat) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's residual of the mean, and that of its part of the sum."""
    if feedback._low_rank is None:
        return feedback._residuals[flat.index]
    # Of the whole gradient, not of this rank's share of the mean.
    return feedback._low_rank._kept[flat.index].residual / 3, torch.zeros(flat.shard_numel)


FEEDBACK = {
    "1 bit": C(all_reduce_bits=1),
    "4 bits": C(all_reduce_bits=4),
    "8 bits": C(all_reduce_bits=8),
    "top": C(all_reduce_top=3),
    "low rank": C(all_reduce_rank=2),
}


@pytest.mark.timeout(60)
def test_what_is_sent_and_what_is_left_add_up_to_the_gradients():
    """On three ranks, whose parts of 722 elements are not all of one length."""
    for found in run_ranks(nothing_is_lost, 3, timeout_s=40):
        assert len(found) == 25 and max(found.values()) < 1e-5, found


def overflows(rank: int) -> tuple[list[float], list[float]]:
    with applied(make_plan(2, 2, compression=C(reduce_bits=4))):
        scales = _scaled_training(rank)[1]
    return scales, _scaled_training(rank)[1]


def test_an_overflow_is_still_one_after_rounding():
    for found, plain in run_ranks(overflows, 2):
        assert found == plain and min(found) < 128


def told(rank: int) -> list[str]:
    notes: list[str] = []
    with applied(
        make_plan(2, 2, compression=C(reduce_bits=8)),
        note=lambda level, text: notes.append(f"{level}: {text}"),
    ):
        DistributedDataParallel(nn.Linear(3, 3).double())
    return notes


def test_a_lossy_plan_says_so_and_what_has_no_effect_too():
    for notes in run_ranks(told, 2):
        assert notes[0].startswith(
            "warning: This plan is lossy: gradients are rounded to 8 bits before each sum"
        )
        assert notes[-1] == (
            "warning: the plan's compression has no effect: no sharded parameter of the model is float32"
        )


@pytest.mark.parametrize(
    ("ranks", "zero", "compression", "words"),
    [
        (2, 2, C(gather_bits=8), "gather_bits 8 with ZeRO stage 2"),
        (2, 1, C(reduce_bits=4), "reduce_bits 4 with ZeRO stage 1"),
        (1, 3, C(reduce_bits=4), "reduce_bits 4 with one rank"),
        (2, 3, C(gather_bits=4), "gather_bits 4"),
        (2, 2, C(all_reduce_bits=1), "all_reduce_bits 1 with ZeRO stage 2"),
        (2, 1, C(all_reduce_bits=1, all_reduce_top=4), "both all_reduce_bits and all_reduce_top"),
        (2, 1, C(all_reduce_top=0), "all_reduce_top 0"),
        (2, 1, C(all_reduce_top=2, all_reduce_rank=4), "both all_reduce_top and all_reduce_rank"),
    ],
)
def test_what_cannot_be_compressed_is_refused(ranks, zero, compression, words):
    with (
        pytest.raises(PlanError, match=words),
        applied(make_plan(ranks, zero, compression=compression)),
    ):
        pass
