"""A script that uses FSDP2 keeps it: what a plan sets, that nothing is computed otherwise, and what it predicts."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from memadvisor.engines.apply import apply, install
from memadvisor.engines.script.live import model_fingerprint
from memadvisor.errors import PlanError
from memadvisor.executors import Algorithm
from memadvisor.plan import Plan, UnitPlan
from memadvisor.plan_file import plan_from_json
from memadvisor.run.fully_sharded import param_groups
from tests.engines.fsdp2_loop import Recorded, foreseen, is_near, looped
from tests.engines.ranks import run_ranks
from tests.engines.trainings import make_plan

BLOCKS, DIM, WORDS = 4, 32, 50
NATIVE = tuple(Algorithm(operation=o, min_bytes=0, name="native") for o in ("all_gather", "reduce_scatter"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Rows that two ranks cannot share evenly are padded, and the head's weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS + 1, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss_of(model, shape, data):
    """Of so many rows of so many words; each is to tell the next one."""
    words = torch.randint(WORDS, shape, generator=data)
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Training:
    def __init__(self, rank):
        torch.manual_seed(0)
        self.model = Model()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(rank)

    def losses(self, num_steps):
        found = []
        for _ in range(num_steps):
            for _ in range(2):
                loss = loss_of(self.model, (8, 33), self.data)
                loss.backward()
                found.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def settings(self):
        """Of each group, in the words of FSDP2's own state."""
        found = {}
        for name in ("", *(f"blocks.{n}" for n in range(BLOCKS))):
            state = self.model.get_submodule(name)._get_fsdp_state()
            (group,) = param_groups(state._modules[0])
            found[name] = (
                group.post_forward_mesh_info is not None,
                [param_groups(s._modules[0])[0]._module_fqn for s in state._states_to_forward_prefetch],
                [param_groups(s._modules[0])[0]._module_fqn for s in state._states_to_backward_prefetch],
                type(group._all_gather_comm).__name__,
            )
        return found


def by_units(reshard, recompute=(), **changes):
    """A plan for FSDP2, whose blocks of these numbers are freed after the forward, or recomputed."""
    names = ["tokens", *(f"blocks.{number}" for number in range(BLOCKS)), "norm"]
    units = tuple(
        UnitPlan(
            name=name,
            zero_stage=3,
            recompute=name in {f"blocks.{n}" for n in recompute},
            reshard=name in {f"blocks.{n}" for n in reshard},
        )
        for name in names
    )
    return replace(make_plan(2, 3, executor="fsdp2"), policy="chosen", units=units, **changes)


PLANS = {
    "freed": by_units(range(BLOCKS), gather_depth=1),
    "some-kept": by_units((0, 3), recompute=(1, 2), gather_depth=2),
    "native": by_units(range(BLOCKS), algorithms=NATIVE),
}


def loop(rank: int, folder: str) -> dict[str, object]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    plain, planned = Training(rank), Training(rank)
    profiled = Recorded(rank, folder, lambda: planned.losses(3))

    found: dict[str, object] = {}

    @contextmanager
    def under(name: str, plan: Plan) -> Iterator[None]:
        found.setdefault("before", planned.settings())
        applied = apply(plan, planned.model, planned.optimizer)
        yield
        found[name] = planned.settings()
        applied.remove()
        assert planned.settings() == found["before"]

    done = looped(rank, profiled, lambda plains: foreseen(plains, 0.97, lambda names: PLANS), under, is_near)
    found.update(
        losses=profiled.losses == plain.losses(len(profiled.losses) // 2),
        peaks=done.peaks,
        budget=done.ahead.budget,
        best=plan_from_json(done.ahead.plans["advised"][0], "advised"),
    )
    return found


@pytest.mark.timeout(150)
def test_the_script_trains_as_before_and_needs_the_memory_that_was_predicted(tmp_path):
    for found in run_ranks(loop, 2, str(tmp_path)):
        assert found["losses"]
        for name, (predicted, measured) in found["peaks"].items():
            assert any(is_near(predicted, peak) for peak in measured), (name, predicted, measured)
        assert min(found["peaks"]["advised"][1]) <= found["budget"]
        assert found["best"].executor == "fsdp2" and {u.zero_stage for u in found["best"].units} == {3}
        assert found["before"][""] == (False, [], [], "DefaultAllGather")
        assert found["freed"]["blocks.1"] == (True, ["blocks.2"], ["blocks.0"], "Gather")
        assert found["freed"][""] == (False, ["blocks.0"], ["blocks.3"], "Gather")
        assert found["native"]["blocks.1"] == (True, [], ["blocks.1"], "DefaultAllGather")
        kept = {name: settings[0] for name, settings in found["some-kept"].items()}
        assert kept == {"": False, "blocks.0": True, "blocks.1": False, "blocks.2": False, "blocks.3": True}


def refusals(rank: int) -> list[str]:
    training, said = Training(rank), []
    inner = Model()
    for block in inner.blocks:
        fully_shard(block)
    for plan, model in (
        (make_plan(2, 2), training.model),
        (make_plan(2, 0), training.model),
        (replace(by_units(()), num_ranks=3), training.model),
        (make_plan(2, 3), inner),
    ):
        applied = install(plan)
        try:
            model(torch.zeros(1, 4, dtype=torch.int64))
            said.append("")
        except PlanError as error:
            said.append(error.one_line())
        finally:
            applied.remove()
    applied = install(by_units(()))
    try:
        DistributedDataParallel(Model())
    except PlanError as error:
        said.append(error.one_line())
    finally:
        applied.remove()
    mixed = fully_shard(Model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    at_rest = model_fingerprint(mixed)
    mixed.unshard()
    said.append("the same model" if model_fingerprint(mixed) == at_rest else "another model")
    return said


@pytest.mark.timeout(100)
def test_what_fsdp2_does_not_do_is_refused_before_the_first_step():
    for said in run_ranks(refusals, 2):
        expected = (
            "ZeRO stage 3, and the plan asks for stage 2",
            "asks for stage 0",
            "FSDP2 has 2",
            "not on the model",
        )
        assert all(words in line for words, line in zip(expected, said[:4], strict=True)), said
        assert "calls fully_shard" in said[4]
        assert said[5] == "the same model"  # gathered in another dtype


def in_closures(model, optimizer, rank):
    """The losses of a training whose forwards and backwards are in the optimizer's closure, as Lightning has them."""
    data = torch.Generator().manual_seed(rank)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, (8, 33), data)
        loss.backward()
        return loss

    return [float(optimizer.step(closure)) for _ in range(3)]


def closures(rank: int) -> dict[str, object]:
    def planned(plan, model, optimizer):
        applied = install(plan)
        try:
            return in_closures(model, optimizer, rank), applied.is_attached
        except PlanError as error:
            return error.one_line(), applied.is_attached
        finally:
            applied.remove()

    alone = Model()
    found: dict[str, object] = {
        "no ranks": planned(make_plan(2, 1), alone, torch.optim.AdamW(alone.parameters()))
    }
    plain = Training(rank)
    losses = in_closures(plain.model, plain.optimizer, rank)
    for name, plan in {"advised": PLANS["some-kept"], "by hand": make_plan(2, 3)}.items():
        training = Training(rank)
        found[name] = planned(plan, training.model, training.optimizer) == (losses, True)
    own = Model()  # whose ranks share nothing
    plan = replace(make_plan(2, 0), policy="every-layer")
    found["recomputed"] = planned(plan, own, torch.optim.AdamW(own.parameters()))[1]
    return found


@pytest.mark.timeout(100)
def test_a_model_that_is_first_called_in_the_optimizers_closure_follows_the_plan():
    for found in run_ranks(closures, 2):
        said, is_attached = found.pop("no ranks")
        assert "does not use DistributedDataParallel" in said and not is_attached
        assert found == {"advised": True, "by hand": True, "recomputed": True}


def evaluations(rank: int) -> list[list[object]]:
    """What a script sees of its parameters and groups between training and evaluation, without a plan and with one."""
    found = []
    for plan in (None, by_units(()), by_units(range(BLOCKS))):
        applied = install(plan) if plan else None
        training, seen = Training(rank), []
        words = torch.zeros(2, 8, dtype=torch.int64)
        for _ in range(2):
            training.losses(1)
            seen.append(training.settings()["blocks.1"][0])
            with torch.no_grad():
                training.model(words)
            seen += [type(each).__name__ for each in training.model.parameters()]
        if applied:
            applied.remove()
        found.append(seen)
    return found


@pytest.mark.timeout(100)
def test_after_an_evaluation_parameters_are_as_the_script_has_them():
    """What a plan keeps until the backward would stay whole after a forward that has none."""
    for plain, kept, freed in run_ranks(evaluations, 2):
        assert plain[0] is freed[0] is True and kept[0] is False
        assert kept.count(False) == 2  # told again before the next training step
        assert [each for each in kept if each is not False] == [each for each in plain if each is not True]
        assert freed == plain
        assert "DTensor" in plain


def labels(rank: int) -> Counter[tuple[str, str]]:
    training, seen = Training(rank), Counter[tuple[str, str]]()
    applied = apply(
        PLANS["freed"],
        training.model,
        training.optimizer,
        label=lambda tensor, category, unit: seen.update([(category, unit)]),
    )
    training.losses(1)
    applied.remove()
    return seen


@pytest.mark.timeout(100)
def test_buffers_of_our_collectives_are_named_to_who_records_the_training():
    """In each of two micro-batches a block is gathered twice and reduced, and what no block has once. Those that a lane's thread
    receives into were called temporaries."""
    for seen in run_ranks(labels, 2):
        assert seen == {("communication", ""): 4} | {
            ("communication", f"blocks.{n}"): 6 for n in range(BLOCKS)
        }


def three(rank: int) -> list[float]:
    plain, planned = Training(rank), Training(rank)
    expected = plain.losses(4)
    applied = apply(replace(make_plan(3, 3, gather_depth=1)), planned.model, planned.optimizer)
    found = planned.losses(4)
    applied.remove()
    return [abs(one - other) / other for one, other in zip(found, expected, strict=True)]


@pytest.mark.timeout(100)
def test_three_ranks_sum_in_another_order():
    for errors in run_ranks(three, 3):
        assert max(errors) < 1e-6
