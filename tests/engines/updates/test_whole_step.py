"""Optimizers that need whole parameters train as under DDP, with each parameter's state on one rank alone."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

from memadvisor.cost.owners import largest_share
from memadvisor.cost.states import UnitStates, WholeUpdate
from memadvisor.engines.apply import apply
from memadvisor.engines.script.live import read_model
from memadvisor.plan import UnitPlan
from memadvisor.precision import Precision
from memadvisor.run.records import Parameter
from tests.engines import optimizers
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, Training, applied, build, make_plan

FOUR_STEPS = Training(steps=4)


@dataclass(frozen=True)
class Case:
    """A training with `kind` of optimizers, under `plans`: ZeRO stages, "m" for another one in each unit."""

    kind: str
    training: Training = FOUR_STEPS
    clip: float | None = None
    scaled: bool = False
    plans: str = "123"


def make(kind: str, model: nn.Module) -> list[optim.Optimizer]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for _, p in named if p.dim() == 2]
    rest = [p for _, p in named if p.dim() != 2]
    if kind == "Muon":
        return [optim.Muon(matrices, lr=0.02), optim.AdamW(rest, lr=1e-2)]
    if kind == "Adafactor":
        return [optim.Adafactor([p for _, p in named], lr=1e-2, weight_decay=0.1)]
    if kind == "Adafactor, foreach":
        return [optim.Adafactor([p for _, p in named], lr=1e-2, foreach=True)]
    if kind == "Lamb":
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": rest, "weight_decay": 0.0, "lr": 2e-2},
        ]
        return [optimizers.Lamb(groups, lr=1e-2)]
    if kind == "Counting":
        return [optimizers.Counting(named, lr=1e-1)]
    return [optimizers.Shampoo([p for _, p in named], lr=1e-2)]


def start(case: Case, rank: int) -> tuple[nn.Module, list[optim.Optimizer]]:
    ddp = build(case.training, rank)
    return ddp, make(case.kind, ddp.module)


def go(case: Case, ddp, made, data, steps: int) -> list[float]:
    training, losses = case.training, []
    schedules = [optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) for optimizer in made]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=case.scaled)
    for step in range(steps):
        for micro_batch in range(training.accumulate):
            last = micro_batch == training.accumulate - 1
            with ddp.no_sync() if training.no_sync and not last else contextlib.nullcontext():
                words = torch.randint(0, 13, (4, 6), generator=data)
                options = {"use_extra": step % 2 == 0} if training.unused else {}
                logits = ddp(words[:, :-1], **options)
                loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten()) / training.accumulate
                scaler.scale(loss).backward()
                losses.append(float(loss.detach()))
        for optimizer in made:
            scaler.unscale_(optimizer)
        if case.clip is not None:
            losses.append(float(nn.utils.clip_grad_norm_(ddp.parameters(), case.clip)))
        for optimizer, schedule in zip(made, schedules, strict=True):
            scaler.step(optimizer)
            schedule.step()
        scaler.update()
        for optimizer in made:
            optimizer.zero_grad(set_to_none=not training.keep_zeros)
    return losses


def whole(ddp, made) -> dict[str, torch.Tensor]:
    """Weights and all that the optimizers keep, flat, by name."""
    found = {f"weight {name}": value.clone() for name, value in ddp.module.state_dict().items()}
    for place, optimizer in enumerate(made):
        saved = optimizer.state_dict()
        _flatten(f"{place} state", saved["state"], found)
        options = [{k: v for k, v in group.items() if k != "params"} for group in saved["param_groups"]]
        _flatten(f"{place} group", dict(enumerate(options)), found)
    return found


def _flatten(name, value, found):
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}.{key}", inner, found)
    elif isinstance(value, (torch.Tensor, int, float)):
        found[name] = torch.as_tensor(value).clone()


def run(case: Case, rank: int):
    ddp, made = start(case, rank)
    losses = go(case, ddp, made, torch.Generator().manual_seed(rank), case.training.steps)
    return losses, whole(ddp, made)


def difference(plain, ours) -> float:
    """The largest, relative to the largest value of the tensor; 0.0 where all bits are equal."""
    (plain_losses, a), (our_losses, b) = plain, ours
    assert list(a) == list(b), (set(a) ^ set(b), list(a)[:5], list(b)[:5])
    a, b = {**a, "losses": torch.tensor(plain_losses)}, {**b, "losses": torch.tensor(our_losses)}
    assert all(a[name].shape == b[name].shape and a[name].dtype == b[name].dtype for name in a)
    assert all(torch.isfinite(value.double()).all() for value in a.values())
    return max(
        0.0
        if torch.equal(a[name], b[name])
        else float((a[name] - b[name]).abs().max() / a[name].abs().max().clamp(min=1e-6))
        for name in a
    )


EXACT = {
    "Muon": Case("Muon"),
    "Adafactor": Case("Adafactor"),
    "Adafactor, foreach": Case("Adafactor, foreach", Training(steps=3, model=(("tied", True),)), plans="3m"),
    "Lamb": Case("Lamb", Training(steps=4, frozen=True)),
    "a counter of the group, zeros kept": Case("Counting", Training(steps=3, keep_zeros=True), plans="2m"),
    "unused": Case("Lamb", Training(steps=4, unused=True), plans="23"),
    "scaled": Case("Muon", scaled=True, plans="13"),
}
DOUBLE = Training(steps=2, dtype="float64")
CLOSE = {
    "Muon, accumulated": Case("Muon", replace(DOUBLE, accumulate=3), plans="12"),
    "Adafactor, no_sync": Case("Adafactor", replace(DOUBLE, accumulate=3, no_sync=True), plans="1m"),
    "Lamb, clipped": Case("Lamb", replace(DOUBLE, steps=3, model=(("tied", True),)), clip=0.3, plans="3"),
    # Products of matrices are rounded by where these begin in memory.
    "Shampoo": Case("Shampoo", replace(DOUBLE, steps=4)),
    "Shampoo, accumulated, unused": Case("Shampoo", replace(DOUBLE, accumulate=3, unused=True), plans="23"),
}


def mixture(training: Training) -> tuple[UnitPlan, ...]:
    rows = read_model(Model(**dict(training.model))).rows
    return tuple(
        UnitPlan(name=row.name, zero_stage=(3 + number) % 4, recompute=False)
        for number, row in enumerate(rows)
    )


def follow_ddp(rank: int, num_ranks: int, cases: dict[str, Case]) -> dict[tuple[str, str], float]:
    found = {}
    for name, case in cases.items():
        plain = run(case, rank)
        for kind in case.plans:
            units = mixture(case.training) if kind == "m" else ()
            zero, ahead = (3, 1) if kind == "m" else (int(kind), 0)
            plan = make_plan(num_ranks, zero, units=units, overlap=bool(ahead), gather_depth=ahead)
            with applied(plan):
                found[name, kind] = difference(plain, run(case, rank))
    return found


@pytest.mark.timeout(120)
def test_two_ranks_equal_ddp_bit_for_bit():
    """Also what `state_dict` gives on every rank. Two numbers have one sum, in whatever order."""
    for found in run_ranks(follow_ddp, 2, 2, EXACT):
        assert len(found) == sum(len(case.plans) for case in EXACT.values())
        assert max(found.values()) == 0, {name: value for name, value in found.items() if value}


@pytest.mark.timeout(120)
def test_sums_in_another_order_stay_within_rounding():
    for found in run_ranks(follow_ddp, 2, 2, CLOSE):
        assert max(found.values()) <= 1e-6, {name: value for name, value in found.items() if value > 1e-6}


def narrow(rank: int) -> dict[str, float]:
    """With narrow parameters over float32 shards: an SGD as users write it, on wholes, against torch's, on pieces."""
    found = {}
    for zero, precision in ((2, Precision(reduce_dtype="bfloat16")), (3, Precision(param_dtype="bfloat16"))):
        both = []
        for written in (True, False):
            with applied(make_plan(2, zero, precision=precision)):
                ddp = build(Training(), rank)
                kind = optimizers.Written if written else optim.SGD
                optimizer = kind(ddp.parameters(), lr=0.1)
                both.append(
                    (go(Case(""), ddp, [optimizer], torch.Generator().manual_seed(rank), 3), whole(ddp, []))
                )
        found[str(zero)] = difference(*both)
    return found


@pytest.mark.timeout(60)
def test_owners_update_the_float32_values_of_narrow_parameters():
    for found in run_ranks(narrow, 2, timeout_s=50):
        assert found == {"2": 0.0, "3": 0.0}


def looks(rank: int, zero: int) -> dict[str, object]:
    """What lies on this rank, what rank 0 saves alone, and how training goes on from that."""
    case = Case("Muon", Training(steps=2))
    found: dict[str, object] = {}
    notes: list[str] = []
    with applied(make_plan(2, zero), note=lambda level, text: notes.append(text)):
        ddp, made = start(case, rank)
        held = [list(group["params"]) for optimizer in made for group in optimizer.param_groups]
        data = torch.Generator().manual_seed(rank)
        go(case, ddp, made, data, 2)
        muon = made[0]
        found["groups at rest"] = held == [
            list(group["params"]) for optimizer in made for group in optimizer.param_groups
        ]
        found["mine"] = [name for name, p in ddp.module.named_parameters() if p in muon.state]
        found["momentum"] = sum(s["momentum_buffer"].numel() for s in muon.state.values())
        saved = b""
        if rank == 0:  # alone, without a barrier
            file = io.BytesIO()
            torch.save([ddp.module.state_dict(), *(optimizer.state_dict() for optimizer in made)], file)
            saved = file.getvalue()
        dist.barrier()
        shared = [saved]
        dist.broadcast_object_list(shared, 0)
        ours = go(case, ddp, made, _again(data), 2)
        ended = whole(ddp, made)
        # Into a run under a plan.
        ddp, made = resume(case, rank, shared[0])
        found["loaded"] = sum(s["momentum_buffer"].numel() for s in made[0].state.values())
        found["under a plan"] = difference(
            (ours, ended), (go(case, ddp, made, _again(data), 2), whole(ddp, made))
        )
    ddp, made = resume(case, rank, shared[0])
    found["without"] = difference((ours, ended), (go(case, ddp, made, _again(data), 2), whole(ddp, made)))
    found["notes"] = [note for note in notes if "needs whole" in note]
    return found


def resume(case: Case, rank: int, saved: bytes) -> tuple[nn.Module, list[optim.Optimizer]]:
    ddp, made = start(case, rank)
    model_state, *states = torch.load(io.BytesIO(saved))
    ddp.module.load_state_dict(model_state)
    for optimizer, state in zip(made, states, strict=True):
        optimizer.load_state_dict(state)
    return ddp, made


def _again(data: torch.Generator) -> torch.Generator:
    return data.clone_state()


def predicted_state_bytes() -> int:
    """Muon's momenta on the rank with most, as the simulator has it."""
    states = {}
    for unit in read_model(Model()).units:
        rows = [
            Parameter(name, unit.name, str(list(p.shape)), "float32", p.numel(), 4 * p.numel(), True, "")
            for name, p in unit.parameters
            if p.dim() == 2
        ]
        updates = (
            WholeUpdate(parameter=row, optimizer="torch.optim._muon.Muon", state_bytes=row.size_bytes)
            for row in rows
        )
        states[unit.name] = UnitStates(
            name=unit.name,
            parameters=tuple(rows),
            optimizer_bytes=0,
            optimizer_scalar_bytes=0,
            whole_updates=tuple(updates),
        )
    return sum(owned.state_bytes for owned in largest_share(states, list(states), 2).values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("zero", [1, 3])
def test_a_checkpoint_by_rank_zero_alone_goes_on_anywhere(zero):
    first, second = run_ranks(looks, 2, zero, timeout_s=50)
    matrices = sum(p.numel() for p in Model().parameters() if p.dim() == 2)
    names = [name for name, p in Model().named_parameters() if p.dim() == 2]
    assert sorted(first["mine"] + second["mine"]) == sorted(names)
    assert first["momentum"] + second["momentum"] == matrices
    assert 4 * max(first["momentum"], second["momentum"]) == predicted_state_bytes()
    for found in (first, second):
        assert found["groups at rest"]
        assert found["momentum"] == found["loaded"] <= 0.6 * matrices
        assert found["under a plan"] == found["without"] == 0
        assert "has 5" in found["notes"][0] and "(50.0 % if even)" in found["notes"][0]


def removed(rank: int, zero: int) -> float:
    """A plan is put on a live training, taken off again with gradients in place, and the training goes on."""
    case = Case("Lamb")

    def script(with_plan):
        ddp, made = start(case, rank)
        data, plan = torch.Generator().manual_seed(rank), None
        losses = go(case, ddp, made, data, 2)
        if with_plan:
            plan = apply(make_plan(2, zero), ddp, made[0])
        losses += go(case, ddp, made, data, 2)
        loss = ddp(torch.randint(0, 13, (4, 6), generator=data)).square().mean()
        loss.backward()
        if plan is not None:
            assert len(made[0].state) < len(list(ddp.parameters()))  # what another rank owns is gone
            plan.remove()
        made[0].step()
        made[0].zero_grad()
        return losses + go(case, ddp, made, data, 1), whole(ddp, made)

    return difference(script(False), script(True))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("zero", [1, 3])
def test_a_removed_plan_leaves_whole_state_on_every_rank(zero):
    assert run_ranks(removed, 2, zero, timeout_s=50) == [0.0, 0.0]


def told_of_state(rank: int, makes: bool) -> list[str]:
    """Between steps a method that is not the step makes state of all parameters, as Sophia's for its curvature does."""
    case, told = Case("Lamb"), []
    with applied(make_plan(2, 2), note=lambda level, text: told.append(text)):
        ddp, made = start(case, rank)
        data = torch.Generator().manual_seed(rank)
        for _ in range(3):
            go(case, ddp, made, data, 1)
            if makes:
                for parameter in ddp.parameters():
                    made[0].state[parameter].setdefault("curvature", torch.zeros_like(parameter))
    return [text for text in told if "outside of its step" in text]


@pytest.mark.timeout(60)
def test_state_of_parameters_that_another_rank_updates_is_told_of_once():
    for told in run_ranks(told_of_state, 2, True, timeout_s=50):
        assert len(told) == 1
        assert told[0].startswith("Lamb had state of ")
    assert run_ranks(told_of_state, 2, False, timeout_s=50) == [[], []]


def peaks(rank: int) -> dict[int, tuple[int, dict[str, int]]]:
    """Bytes of each category that are labelled in the third step, and which stay."""
    found = {}
    for zero in (1, 2, 3):
        labelled: list[tuple[str, int]] = []

        def label(tensor, category, unit, labelled=labelled):
            labelled.append((category, tensor.numel() * tensor.element_size()))

        with applied(make_plan(2, zero), label=label):
            ddp, made = start(Case("Lamb"), rank)
            data = torch.Generator().manual_seed(rank)
            for _ in range(2):
                ddp(torch.randint(0, 13, (4, 6), generator=data)).square().mean().backward()
                labelled.clear()
                made[0].step()
                made[0].zero_grad()
            owned = sum(p.numel() for p in made[0].state) * 4
            sums: dict[str, int] = {}
            for category, size in labelled:
                sums[category] = sums.get(category, 0) + size
            found[zero] = (owned, sums)
    return found


@pytest.mark.timeout(60)
def test_an_owner_receives_what_it_owns_and_no_more():
    for found in run_ranks(peaks, 2, timeout_s=50):
        for zero, (owned, sums) in found.items():
            assert sums.get("gradient", 0) == (owned if zero >= 2 else 0)
            assert sums.get("parameter", 0) == (owned if zero == 3 else 0)


@pytest.mark.timeout(120)
def test_three_ranks_follow_ddp():
    """A flat's owners are not those of its shards in yet another way."""
    cases = {name: case for name, case in CLOSE.items() if case.training.accumulate > 1}
    for found in run_ranks(follow_ddp, 3, 3, cases):
        assert max(found.values()) <= 1e-6, {name: value for name, value in found.items() if value > 1e-6}
