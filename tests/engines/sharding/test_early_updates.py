"""Units updated inside the backward: the same training in every bit, and what the script does that stands against it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memadvisor.engines.apply import install
from memadvisor.plan import UnitPlan
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan, micro_batch_loss

STEPS = 4

TRAININGS = {
    "plain": Training(),
    "momentum, accumulated": Training(optimizer="sgd", accumulate=3),
    "groups, no_sync": Training(optimizer="groups", accumulate=3, no_sync=True),
    "tied": Training(model=(("tied", True),)),
    "frozen, zeros kept": Training(frozen=True, accumulate=2, keep_zeros=True),
    "batch norm": Training(model=(("batch_norm", True),), optimizer="sgd"),
    "checkpointed by the script": Training(model=(("checkpointed", True), ("dropout", 0.2)), bf16=True),
}
# Stage, and whether transfers overlap, in turn.
KINDS = [(3, True), (2, True), (3, False), (2, False)]


def trained(training: Training, rank: int, each: Callable[..., None] = lambda *_: None) -> list[torch.Tensor]:
    """Losses, and in the end this rank's shards and all that its optimizers keep for them."""
    ddp = build(training, rank)
    optimizer = make_optimizer(training.optimizer, ddp)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(STEPS):
        for micro_batch in range(training.accumulate):
            waits = training.no_sync and micro_batch < training.accumulate - 1
            with ddp.no_sync() if waits else contextlib.nullcontext():
                losses.append(micro_batch_loss(training, ddp, data, use_extra=False))
        each(step, ddp, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=not training.keep_zeros)
    executor = ddp.reducer.executor
    executor.arrivals.settle()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [
        torch.tensor(losses),
        *(flat.shard.clone() for flat in executor.flats if flat.shard is not None),
        *kept,
    ]


def num_spent(ddp: nn.Module) -> int:
    return len(ddp.reducer.executor.early._spent)


def same_under_plans(rank: int) -> dict[tuple[str, int, bool], tuple[bool, list[int], list[str]]]:
    """Whether all is equal, how many parameters each step finds updated already, and warnings."""
    found = {}
    for number, (name, training) in enumerate(TRAININGS.items()):
        for zero, overlap in (KINDS[number % 4], KINDS[(number + 1) % 4]):
            found[name, zero, overlap] = both_ways(rank, training, zero, overlap)
    return found


def both_ways(rank: int, training: Training, zero: int, overlap: bool) -> tuple[bool, list[int], list[str]]:
    results, spent, warnings = [], [], []

    def count(step: int, ddp: nn.Module, optimizer: Any) -> None:
        spent.append(num_spent(ddp))

    def note(level: str, text: str) -> None:
        warnings.extend([text] if level == "warning" else [])

    for early in (False, True):
        plan = make_plan(2, zero, overlap=overlap, gather_depth=int(overlap), update_in_backward=early)
        with applied(plan, note=note):
            results.append(trained(training, rank, count if early else lambda *_: None))
    return len(results[0]) == len(results[1]) and all(map(torch.equal, *results)), spent, warnings


@pytest.mark.timeout(120)
def test_losses_weights_and_states_are_those_of_updates_in_the_step():
    """From the second step on all is updated early, but for tied weights; frozen parameters never are."""
    num_parameters = {"tied": 19, "frozen, zeros kept": 14, "batch norm": 27}
    for found in run_ranks(same_under_plans, 2):
        assert {key[1:] for key in found} == set(KINDS)
        for (name, zero, overlap), (same, spent, warnings) in found.items():
            assert same, (name, zero, overlap)
            assert spent == [0] + [num_parameters.get(name, 21)] * (STEPS - 1), (name, zero, overlap)
            assert not warnings


def mixture_of_two_optimizers(rank: int) -> tuple[bool, list[int]]:
    """One optimizer updates elements, by a closure, the other one whole parameters; units of all stages."""
    (late, _), (early, spent) = (_mixture(rank, early) for early in (False, True))
    return all(map(torch.equal, late, early)), spent


def _mixture(rank: int, early: bool) -> tuple[list[torch.Tensor], list[int]]:
    stages = {"": 3, "tokens": 2, "blocks.0": 3, "blocks.1": 2, "blocks.2": 1, "head": 0}
    units = tuple(UnitPlan(name=n, zero_stage=s, recompute=n == "blocks.1") for n, s in stages.items())
    plan = make_plan(2, 3, units=units, overlap=True, gather_depth=1, update_in_backward=early)
    with applied(plan):
        ddp = build(Training(), rank)
        mine = {id(p) for p in ddp.module.blocks[0].parameters()}
        whole = torch.optim.Adafactor(ddp.module.blocks[0].parameters(), lr=1e-2)
        rest = torch.optim.AdamW([p for p in ddp.parameters() if id(p) not in mine], lr=1e-2)
        data = torch.Generator().manual_seed(rank)
        losses, spent = [], []

        def closure() -> float:
            rest.zero_grad()
            whole.zero_grad()
            losses.append(micro_batch_loss(Training(), ddp, data, use_extra=False))
            return losses[-1]

        for _ in range(STEPS):
            rest.step(closure)
            spent.append(num_spent(ddp))
            whole.step()
        executor = ddp.reducer.executor
        executor.arrivals.settle()
        return [
            torch.tensor(losses),
            *(f.shard.clone() for f in executor.flats if f.shard is not None),
        ], spent


def test_what_cannot_be_updated_early_is_updated_in_the_step():
    """Of two optimizers, the elementwise one's units of stage 2 and 3: the model's own scale, tokens and blocks.1."""
    for same, spent in run_ranks(mixture_of_two_optimizers, 2):
        assert same
        assert spent == [0] + [1 + 1 + 6] * (STEPS - 1)


# ---- what a script may do between a backward and its optimizer step -------------------------------


def _clip(ddp, optimizer):
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)


def _clip_values(ddp, optimizer):
    nn.utils.clip_grad_value_(ddp.parameters(), 0.01)


def _read_on_one_rank(ddp, optimizer):
    if dist.get_rank() == 0:
        float(ddp.module.head.weight.grad.norm())


def _unscale(ddp, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def _change_lr(ddp, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5


def _read_weight(ddp, optimizer):
    float(ddp.module.head.weight.sum())


def _evaluate(ddp, optimizer):
    with torch.no_grad():
        ddp.module(torch.arange(4).view(1, 4))


def _save_optimizer(ddp, optimizer):
    optimizer.state_dict()


def _drop(ddp, optimizer):
    optimizer.zero_grad()


def _zero(ddp, optimizer):
    optimizer.zero_grad(set_to_none=False)


def _step_twice(ddp, optimizer):
    optimizer.step()


def _another_backward(ddp, optimizer):
    ddp(torch.arange(4).view(1, 4)).square().mean().backward()


# What the note says if the first step does it already, and what the error says if a later one is the first.
DEEDS = {
    _clip: ("looks at gradients", "is asked for, and is gone"),
    _clip_values: ("looks at gradients", "is asked for, and is gone"),
    _read_on_one_rank: ("looks at gradients|another rank", "is asked for, and is gone|"),
    _unscale: ("looks at gradients", "is asked for, and is gone"),
    _change_lr: ("changes 'lr'", "changes 'lr' of AdamW between"),
    _read_weight: ("needs unit 'head' after its backward, before", "needs unit 'head' after"),
    _evaluate: ("runs the model between", "runs the model between"),
    _save_optimizer: ("needs unit .* after its backward, before", "needs unit .* after its backward"),
    _drop: ("drops gradients before", "drops the gradient of"),
    _zero: ("zeroes gradients before", "zeroes the gradient of"),
    _step_twice: ("steps twice", "steps twice on the gradient of"),
    # Two backwards before the first step are a rhythm like any other.
    _another_backward: ("", "runs the model between|A backward begins before"),
}


# Of these stage 2 learns in another way than stage 3.
OF_STAGE_2 = (_clip, _read_weight, _evaluate, _zero)


def warned_and_failed(rank: int, deed: Callable[..., None], zero: int, at: int) -> tuple[bool, str, str]:
    """Whether all is as without early updates, the warnings, and the error; what fails is not compared."""
    results, warnings, error = [], [], ""

    def each(step: int, ddp: nn.Module, optimizer: Any) -> None:
        if step >= at:
            deed(ddp, optimizer)

    def note(level: str, text: str) -> None:
        warnings.extend([text] if level == "warning" else [])

    for early in (False, True) if at == 0 else (True,):
        with applied(make_plan(2, zero, overlap=True, gather_depth=1, update_in_backward=early), note=note):
            try:
                results.append(trained(Training(), rank, each))
            except RuntimeError as found:
                error = str(found)
    return len(results) == 2 and all(map(torch.equal, *results)), " ".join(warnings), error


def all_deeds(rank: int, zero: int) -> dict[Callable[..., None], list[tuple[bool, str, str]]]:
    return {
        # What fails on one rank alone leaves the other one waiting for it.
        deed: [
            warned_and_failed(rank, deed, zero, at) for at in ((0,) if deed is _read_on_one_rank else (0, 2))
        ]
        for deed in (OF_STAGE_2 if zero == 2 else DEEDS)
    }


@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", [2, 3])
def test_what_the_first_step_shows_to_be_wrong_is_not_begun_and_what_a_later_one_does_is_said(zero):
    for found in run_ranks(all_deeds, 2, zero):
        for deed, ((same, warnings, error), *later) in found.items():
            reason, complaint = DEEDS[deed]
            assert same and not error, (deed, error)
            assert re.search(reason, warnings) and bool(warnings) == bool(reason), (deed, warnings)
            for _, _, error in later:
                assert re.search(complaint, error) and "without the update" in error, (deed, error)


def taken_off(rank: int) -> tuple[list[float], list[float], str]:
    """Losses of a plan that is taken off after a step, of one that is not there, and what happens before a step."""
    losses = []
    for plan in (None, make_plan(2, 3, overlap=True, gather_depth=1, update_in_backward=True)):
        engine = install(plan) if plan is not None else None
        ddp = build(Training(), rank)
        optimizer = make_optimizer("sgd", ddp)
        data = torch.Generator().manual_seed(rank)
        of_plan = []
        for step in range(STEPS):
            of_plan.append(micro_batch_loss(Training(), ddp, data, use_extra=False))
            optimizer.step()
            if engine is not None and step == 2:
                engine.remove()
                assert all(type(p) is nn.Parameter and p.grad is None for p in ddp.parameters())
            optimizer.zero_grad()
        losses.append(of_plan)
    error = ""
    with applied(plan):
        ddp = build(Training(), rank)
        optimizer = make_optimizer("sgd", ddp)
        for _ in range(2):
            micro_batch_loss(Training(), ddp, data, use_extra=False)
            if not num_spent(ddp):
                optimizer.step()
                optimizer.zero_grad()
        try:
            ddp.reducer.executor.early.end()
        except RuntimeError as found:
            error = str(found)
    return losses[0], losses[1], error


def test_taking_the_plan_off_leaves_a_plain_model_but_not_between_an_update_and_its_step():
    for plain, ours, error in run_ranks(taken_off, 2):
        assert plain == ours
        assert "taken off between a backward" in error
