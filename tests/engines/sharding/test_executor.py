"""Trainings under a plan follow DDP's losses, step by step, whatever the stage and the way the loop is written."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from memadvisor.engines.script.live import read_model
from memadvisor.plan import UnitPlan
from tests.engines.ranks import run_ranks
from tests.engines.test_virtual_lane import AtOnce
from tests.engines.trainings import Model, Training, applied, build, largest_difference, make_plan, train
from tests.engines.virtual_ranks import UNITS, Case, executing


def units_of(training: Training, kind: str) -> tuple[UnitPlan, ...]:
    """`mixture`: another stage for each unit; `kept`: stage 3, all but one stay until their backward; `parts`: stage 3, parts
    of blocks run again.

    In all every other block is recomputed.
    """
    rows = read_model(Model(unused=training.unused, **dict(training.model))).rows
    return tuple(
        UnitPlan(
            name=row.name,
            zero_stage=(3 + number) % 4 if kind == "mixture" else 3,
            recompute=row.is_block and number % 2 == 0,
            reshard=number == 1 or kind == "parts",
            parts=parts_of(row.name) if kind == "parts" and row.is_block else (),
        )
        for number, row in enumerate(rows)
    )


def parts_of(block: str) -> tuple[tuple[str, ...], ...]:
    return (f"{block}.norm",), (f"{block}.down", f"{block}.dropout")


TRAININGS = {
    "plain": Training(),
    "momentum": Training(optimizer="sgd"),
    "groups, accumulated": Training(optimizer="groups", accumulate=3),
    "no_sync": Training(accumulate=3, no_sync=True, optimizer="sgd"),
    "tied": Training(model=(("tied", True),)),
    "frozen, zeros kept": Training(frozen=True, accumulate=2, keep_zeros=True),
    "unused": Training(unused=True),
    "unused, no_sync": Training(unused=True, accumulate=2, no_sync=True, optimizer="groups"),
    "batch norm": Training(model=(("batch_norm", True),), optimizer="sgd"),
    "dropout": Training(model=(("dropout", 0.3),)),
    "clipped": Training(clip=0.3, optimizer="groups", accumulate=2),
    "bf16": Training(bf16=True),
    "checkpointed by the script": Training(model=(("checkpointed", True), ("dropout", 0.2))),
}


# Stage, kind of units, gather depth (and overlap of reductions, where it is not 0).
KINDS = [(0, "", 0), (1, "", 0), (2, "", 1), (3, "", 1), (3, "mixture", 1), (3, "kept", 2), (3, "parts", 1)]


def stages_follow_ddp(
    rank: int, num_ranks: int, names: list[str]
) -> dict[tuple[str, str], tuple[float, float]]:
    found = {}
    for name in names:
        training = TRAININGS[name]
        plain = train(training, rank)
        for zero, kind, depth in KINDS:
            units = units_of(training, kind) if kind else ()
            with applied(make_plan(num_ranks, zero, units=units, overlap=depth > 0, gather_depth=depth)):
                ours = train(training, rank)
            found[name, f"{zero} {kind} {depth}"] = tuple(map(largest_difference, plain, ours))
    return found


@pytest.mark.parametrize("half", [0, 1])
def test_losses_and_weights_follow_ddp(half):
    """Two ranks add two numbers, in whatever order; sums over micro-batches and clipping's norm are reordered."""
    names = list(TRAININGS)[half::2]
    for found in run_ranks(stages_follow_ddp, 2, 2, names):
        assert len(found) == len(KINDS) * len(names)
        for (name, zero), (loss, weight) in found.items():
            exact = TRAININGS[name].clip is None and TRAININGS[name].accumulate == 1
            assert loss <= (0 if exact else 1e-5), (name, zero, loss)
            assert weight <= (0 if exact else 1e-4), (name, zero, weight)


def clipping_values(rank: int) -> list[list[float]]:
    def clip(ddp, optimizer, step):
        torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.02)
        norms = [
            float(torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()], k))
            for k in (1, 3, float("inf"))
        ]
        seen.extend([*norms, *(float(p.grad.norm()) for p in ddp.parameters())])

    results = []
    for zero in (None, 0, 1, 2, 3):
        seen: list[float] = []
        if zero is None:
            losses, _ = train(Training(steps=4), rank, clip)
        else:
            with applied(make_plan(2, zero)):
                losses, _ = train(Training(steps=4), rank, clip)
        results.append(losses + seen)
    return results


def test_norms_and_value_clipping_see_whole_gradients():
    """`p.grad` reads as the whole gradient on every rank, though a rank holds its shard alone."""
    for plain, *ours in run_ranks(clipping_values, 2):
        for found in ours:
            assert largest_difference(plain, found) <= 1e-5


def scaled(rank: int) -> list[tuple[list[float], list[float]]]:
    results = []
    for zero in (None, 0, 1, 2, 3):
        plan = applied(make_plan(2, zero)) if zero is not None else contextlib.nullcontext()
        with plan:
            results.append(_scaled_training(rank))
    return results


def _scaled_training(rank):
    from tests.engines.trainings import build, make_optimizer

    ddp = build(Training(), rank)
    optimizer = make_optimizer("sgd", ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    data = torch.Generator().manual_seed(rank)
    losses, scales = [], []
    for step in range(6):
        words = torch.randint(0, 13, (4, 6), generator=data)
        loss = ddp(words).square().mean()
        if step == 3 and rank == 1:
            # One element of one gradient overflows on one rank: every rank must skip the step.
            loss = loss + ddp.module.head.weight[12, 8] * 1e38 * 1e3
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        losses.append(float(torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)) if step != 3 else 0.0)
        losses.append(float(loss.detach()) if step != 3 else 0.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return losses, scales


def test_an_overflow_on_one_shard_is_an_overflow_on_every_rank():
    for (losses, scales), *ours in run_ranks(scaled, 2):
        assert min(scales) < 64.0 * 2  # the overflow was seen
        for other_losses, other_scales in ours:
            assert other_scales == scales
            assert largest_difference(losses, other_losses) <= 1e-5


def several_forwards_of(rank: int) -> list[float]:
    from tests.engines.trainings import build, make_optimizer

    ddp = build(Training(), rank)
    optimizer = make_optimizer("adamw", ddp)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(4):
        first, second = (ddp(torch.randint(0, 13, (4, 6), generator=data)) for _ in range(2))
        loss = (
            first.square().mean() + (first - second).abs().mean()
        ) + ddp.module.head.weight.square().sum() * 0.1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def several_forwards(rank: int) -> list[list[float]]:
    results = [several_forwards_of(rank)]
    for zero in (0, 1, 2, 3):
        with applied(make_plan(2, zero)):
            results.append(several_forwards_of(rank))
    return results


def test_several_forwards_before_a_backward_and_a_penalty_on_weights():
    """The penalty reads released parameters outside any forward, and its gradient reaches them."""
    for plain, *ours in run_ranks(several_forwards, 2):
        for found in ours:
            assert largest_difference(plain, found) <= 1e-6


def optimizers(rank: int) -> dict[tuple[str, int], float]:
    found = {}
    for kind in ("Adam", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax", "ASGD"):
        plain = train(Training(optimizer=kind, steps=3), rank)
        for zero in (1, 3):
            with applied(make_plan(2, zero)):
                ours = train(Training(optimizer=kind, steps=3), rank)
            found[kind, zero] = max(map(largest_difference, plain, ours))
    return found


def test_elementwise_optimizers_update_pieces_as_wholes():
    for found in run_ranks(optimizers, 2):
        assert len(found) == 18
        assert max(found.values()) == 0, found


def isinstance_stays(rank: int) -> bool:
    from tests.engines.trainings import build

    with applied(make_plan(2, 3)):
        ddp = build(Training(), rank)
        names = [name for name, _ in ddp.named_parameters()]
        same = all(isinstance(p, torch.nn.Parameter) for p in ddp.parameters())
        return (
            type(ddp) is DistributedDataParallel
            and same
            and names[0] == "module.scale"
            and not ddp.eval().training
        )


def missing_gradient(rank: int) -> list[str]:
    """A parameter without a gradient, and no find_unused_parameters: what a second forward says."""

    def script():
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 3), "spare": torch.nn.Linear(3, 3)})
        model.forward = lambda x: model["used"](x)
        ddp = DistributedDataParallel(model)
        for _ in range(2):
            ddp(torch.ones(2, 3)).sum().backward()

    told = []
    for zero in (None, 0, 2):
        with applied(make_plan(2, zero)) if zero is not None else contextlib.nullcontext():
            try:
                script()
            except RuntimeError as error:
                told.append(str(error)[:70])
    return told


def test_a_missing_gradient_is_an_error_as_under_ddp():
    for told in run_ranks(missing_gradient, 2, timeout_s=40):
        assert len(told) == 3 and len(set(told)) == 1


def test_ddp_stays_ddp():
    assert run_ranks(isinstance_stays, 2) == [True, True]


def test_three_ranks_follow_ddp():
    """With three ranks the sums are in another order than DDP's ring, and shards need more padding."""
    names = ["tied", "unused, no_sync"]
    for found in run_ranks(stages_follow_ddp, 3, 3, names):
        for key, (loss, weight) in found.items():
            assert loss <= 1e-5, (key, loss)
            assert weight <= 1e-3, (key, weight)


def adopted_gradients(rank: int) -> dict[int, list[bool]]:
    """For each stage, whether autograd's tensor of the embedding's and of a block's gradient is the buffer's."""
    found = {}
    for stage in (0, 2):
        made = {}
        with applied(make_plan(2, stage)) as engine:
            ddp = build(Training(model=(("dim", 10),)), rank)
            watched = {"tokens": ddp.module.tokens.weight, "blocks.0": ddp.module.blocks[0].up.weight}
            for name, parameter in watched.items():
                parameter.register_hook(lambda g, name=name, made=made: made.update({name: g.data_ptr()}))
            (executor,) = engine._executors
            reduce_unit, buffers = executor.reduce_unit, []

            def reduce(unit, reduce_unit=reduce_unit, buffers=buffers, watched=watched, made=made):
                if unit.name in watched:
                    buffers.append(unit.flats[0].grad.data_ptr() == made[unit.name])
                reduce_unit(unit)

            executor.reduce_unit = reduce
            ddp(torch.arange(6)[None]).sum().backward()
            found[stage] = buffers
    return found


def test_a_gradient_that_fills_its_units_buffer_becomes_it():
    """The embedding is alone in its unit; the block's first gradient is one of several."""
    assert run_ranks(adopted_gradients, 2) == [{0: [False, True], 2: [False, True]}] * 2


def shared_gathers(rank: int) -> list[tuple[int, bool]]:
    """After each of two steps: how often the tied embedding was gathered in it, and whether it is still there."""
    found, gathered = [], []
    with applied(make_plan(2, 3)) as engine:
        ddp = build(Training(model=(("tied", True), ("dim", 10))), rank)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        (executor,) = engine._executors
        tokens, gather = executor.units["tokens"].flats[0], executor.sharded.wire.gather

        def count(full, shard, *rest):
            gathered.append(full is tokens.full)
            gather(full, shard, *rest)

        executor.sharded.wire.gather = count
        for _ in range(2):
            gathered.clear()
            words = torch.arange(6)[None]
            loss = ddp(words).sum()
            if rank == 0:  # alone, between the others' forward and backward
                ddp.module.eval()
                with torch.no_grad():
                    ddp.module(words)
                ddp.module.train()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((sum(gathered), tokens.present))
    return found


def test_tied_weights_are_gathered_once_a_step():
    """Also where one rank alone evaluates before the backward."""
    assert run_ranks(shared_gathers, 2, timeout_s=30) == [[(1, False)] * 2] * 2


def memory_at_step(rank: int, num_ranks: int) -> dict[tuple[int, bool], dict[str, int]]:
    """Bytes of the storages that hold model states when the third optimizer step begins."""
    found = {}
    for zero in (0, 1, 2, 3):
        for accumulate in (1, 2):
            with applied(make_plan(num_ranks, zero)) as plan:

                def look(ddp, optimizer, step, plan=plan, key=(zero, accumulate)):
                    if step == 2:
                        found[key] = _state_bytes(ddp, optimizer, plan)

                train(Training(accumulate=accumulate, steps=3), rank, look)
    return found


def _state_bytes(ddp, optimizer, plan):
    tensors = {"parameter": [], "gradient": [], "communication": [], "state": [], "step": []}
    for tensor, category, _ in plan.labelled_tensors():
        tensors[category].append(tensor)
    for parameter in ddp.parameters():
        if type(parameter) is torch.nn.Parameter:  # a released one is a NaN
            tensors["parameter"].append(parameter)
        if parameter.grad is not None:
            tensors["gradient"].append(parameter.grad)
    for state in optimizer.state.values():
        for key, value in state.items():
            tensors["step" if key == "step" else "state"].append(value)
    sizes = {category: _storage_bytes(found) for category, found in tensors.items()}
    sizes["P"] = sum(p.numel() * 4 for p in ddp.parameters())
    sizes["padding"] = sum(
        flat.padding_bytes for executor in plan._executors for flat in executor.flats if flat.stage >= 1
    )
    sizes["everything"] = _reachable_bytes()
    return sizes


def _storage_bytes(tensors) -> int:
    storages = {}
    for tensor in tensors:
        try:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes() if storage.data_ptr() else 0
        except RuntimeError:
            pass  # a stand-in without storage
    return sum(storages.values())


def _reachable_bytes() -> int:
    gc.collect()
    return _storage_bytes([item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)])


def test_model_states_are_exactly_the_theory_but_for_padding():
    for num_ranks in (2, 4):
        for found in run_ranks(memory_at_step, num_ranks, num_ranks):
            for (zero, _), sizes in found.items():
                p, n, padding = sizes["P"], num_ranks, sizes["padding"]
                assert padding < n * 4 * 6  # six flats
                parameters = p / n if zero == 3 else p
                gradients = p / n if zero >= 2 else p
                states = 2 * p / n if zero >= 1 else 2 * p
                assert 0 <= sizes["parameter"] - parameters <= padding
                assert 0 <= sizes["gradient"] - gradients <= (padding if zero >= 2 else 0)
                # Padding has no optimizer state, so the last rank holds a little less.
                assert abs(sizes["state"] - states) <= 2 * padding
                rest = sizes["everything"] - sum(sizes[c] for c in ("parameter", "gradient", "state"))
                assert rest < 2000, (zero, sizes)  # batch, logits, counters: nothing of the model's size


@pytest.mark.parametrize("depth", [1, 2])
def test_what_follows_a_tied_unit_is_gathered_once_a_forward(depth):
    """The head calls for the embedding a second time, which is still there; what ran behind it has been freed since."""
    case = Case(make_plan(2, 3, overlap=True, gather_depth=depth), 0, (True,), evaluates=False, looks=False)
    gathered = []
    with executing(case, AtOnce()) as (ddp, executor):
        executor.sharded.remember = lambda operation, flat: gathered.append(flat.unit)
        ddp(torch.arange(4))

    assert sorted(gathered) == sorted(UNITS)


def test_units_inside_of_another_are_gathered_ahead_like_any():
    """The model has a parameter of its own, so that it is a unit around all others: they are not lent to it."""
    case = Case(make_plan(2, 3, overlap=True, gather_depth=1), 0, (True,), evaluates=False, looks=False)
    at_once = []
    with executing(case, AtOnce()) as (ddp, executor):
        gather = executor.sharded.transfers.gather
        executor.sharded.transfers.gather = lambda flat: (at_once.append(flat.unit), gather(flat))
        ddp(torch.arange(4))

    assert UNITS[0] == "" and at_once == [""]
