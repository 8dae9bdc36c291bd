"""A script whose FSDP2 shards inside groups of ranks and sums across them (HSDP) keeps its mesh under a plan, which
computes nothing otherwise and needs the memory that was predicted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import memadvisor
from memadvisor.engines.apply import apply
from memadvisor.plan import Plan, UnitPlan
from memadvisor.plan_file import plan_from_json
from memadvisor.run.fully_sharded import param_groups
from tests.engines.fsdp2_loop import Recorded, foreseen, is_near, looped, on_first, refusal_of
from tests.engines.ranks import run_ranks
from tests.engines.test_fsdp2 import NATIVE
from tests.engines.trainings import make_plan

BLOCKS, DIM, WORDS, LENGTH, RANKS = 4, 32, 51, 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, words):
        x = self.tokens(words) + self.places(torch.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, data):
        words = torch.randint(WORDS, (4, LENGTH + 1), generator=data)
        return F.cross_entropy(self(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())


class Layers(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width))

    def forward(self, x):
        return x + super().forward(x)


class Mlp(nn.Module):
    """Rows that two ranks cannot share evenly."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(33, 45), nn.Linear(45, 7)
        self.blocks = nn.ModuleList(Layers(45) for _ in range(BLOCKS))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, data):
        x, labels = torch.randn(64, 33, generator=data), torch.randint(7, (64,), generator=data)
        return F.cross_entropy(self(x), labels)


class Training:
    """`frees_model`: what no block has is freed after the forward. `sums_late`: gradients are summed across groups of ranks in the last micro-batch of a step alone."""

    def __init__(
        self, rank, kind, num_micro_batches, *, sums_late=False, policy=None, shape=(2, 2), frees_model=None
    ):
        torch.manual_seed(0)
        self.model = kind()
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        options = {} if policy is None else {"mp_policy": policy}
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=frees_model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.num_micro_batches, self.sums_late = num_micro_batches, sums_late
        self.data = torch.Generator().manual_seed(rank)

    def losses(self, num_steps):
        found = []
        for _ in range(num_steps):
            for number in range(self.num_micro_batches):
                if self.sums_late:
                    self.model.set_requires_all_reduce(number == self.num_micro_batches - 1)
                loss = self.model.loss(self.data)
                loss.backward()
                found.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return found

    def weights(self):
        return [parameter.full_tensor() for parameter in self.model.parameters()]


def block_units(names, kept=(), recompute=()):
    """For FSDP2: blocks of these numbers stay gathered until the backward, or are recomputed."""
    return tuple(
        UnitPlan(
            name=name,
            zero_stage=3,
            recompute=name in {f"blocks.{number}" for number in recompute},
            reshard=name not in {f"blocks.{number}" for number in kept},
        )
        for name in names
    )


def by_units(names, kept=(), recompute=(), **changes):
    units = block_units(names, kept, recompute)
    made = make_plan(RANKS, 3, executor="fsdp2", shard_ranks=2)
    return replace(made, policy="chosen", units=units, **changes)


ALL = range(BLOCKS)
PLANS = {
    "freed": {"gather_depth": 1},
    "kept": {"kept": ALL, "recompute": ALL, "gather_depth": 1},
    "some": {"kept": (1, 2), "recompute": (1,), "gather_depth": 2},
    "native": {"recompute": (0, 1, 2), "algorithms": NATIVE},
    "freed the model too": {"gather_depth": 1, "reshard_model": True},
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
CASES = {
    "gpt": ((Gpt, 1), {}, ("freed", "some")),
    "gpt, two micro-batches": ((Gpt, 2), {}, ("kept", "native")),
    "mlp": ((Mlp, 1), {}, ("kept", "native")),
    "mlp, summed late": ((Mlp, 3), {"sums_late": True}, ("freed", "kept")),
    "gpt, freed": ((Gpt, 1), {"frees_model": True}, ("freed the model too",)),
    "gpt, bfloat16": ((Gpt, 2), {"policy": BF16}, ("freed",)),
}


def loop(rank: int, folder: str, case: str) -> dict[str, object]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    arguments, options, names = CASES[case]
    plain, planned = (Training(rank, *arguments, **options) for _ in range(2))
    profiled = Recorded(rank, folder, lambda: planned.losses(3))

    def plans_of(units: list[str]) -> dict[str, Plan]:
        return {name: by_units(units, **PLANS[name]) for name in names}

    @contextmanager
    def under(name: str, plan: Plan) -> Iterator[None]:
        applied = apply(plan, planned.model, planned.optimizer)
        yield
        applied.remove()

    done = looped(rank, profiled, lambda plains: foreseen(plains, 0.9, plans_of), under, is_near)
    ahead = done.ahead
    advised = plan_from_json(ahead.plans["advised"][0], "advised")
    found = {
        "losses": profiled.losses == plain.losses(len(profiled.losses) // plain.num_micro_batches),
        "weights": all(map(torch.equal, planned.weights(), plain.weights())),
        "peaks": done.peaks,
        "budget": ahead.budget,
        "advised": (advised.executor, advised.shard_ranks),
    }
    if "native" in names:  # our own pairwise messages are no collectives
        measured = on_first(rank, lambda: sent_bytes(done.paths["native"], ahead.rank))
        found["sent"] = ahead.plans["native"][2], measured
    return found


def sent_bytes(path: Path, number: int) -> int:
    """What a rank of groups of two sends in collectives of the traced step: half of a gather or a reduction to shards."""
    rank = memadvisor.load(path).ranks[number]
    rows = [row for row in rank.collectives if row.step == rank.traced_step.index and row.group_size == 2]
    shares = {"all_gather": 0.5, "reduce_scatter": 0.5, "all_reduce": 1}
    return round(sum(shares.get(row.operation, 0) * row.size_bytes for row in rows))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", CASES)
def test_the_script_trains_as_before_and_needs_the_memory_that_was_predicted(tmp_path, case):
    for found in run_ranks(loop, RANKS, str(tmp_path), case, timeout_s=180):
        assert found["losses"] and found["weights"]
        for name, (predicted, measured) in found["peaks"].items():
            assert any(is_near(predicted, peak) for peak in measured), (name, predicted, measured)
        assert min(found["peaks"]["advised"][1]) <= found["budget"]
        assert found["advised"] == ("fsdp2", 2)
        if "sent" in found:
            predicted, measured = found["sent"]
            assert predicted == measured


def refusals(rank: int) -> list[str]:
    said = []
    names = ["tokens", "places", *(f"blocks.{number}" for number in ALL), "norm", "head"]
    for plan, shape in (
        (replace(by_units(names), shard_ranks=None), (2, 2)),
        (make_plan(RANKS, 3, shard_ranks=4), (2, 2)),
        (make_plan(RANKS, 3), (4, 1)),
        (make_plan(RANKS, 3), (2, 2)),
    ):
        training = Training(rank, Gpt, 1, shape=shape)
        said.append(refusal_of(plan, partial(training.losses, 1)))
    return said


@pytest.mark.timeout(100)
def test_a_plan_for_other_groups_of_ranks_is_refused_and_one_by_hand_takes_the_scripts():
    for said in run_ranks(refusals, RANKS):
        words = "for shards that 4 ranks share, and the script's FSDP2 shares its shards among 2"
        assert words in said[0] and words in said[1]
        assert "shares parameters with no other rank" in said[2]
        assert not said[3]


def freed_models(rank: int) -> list[tuple[bool, bool]]:
    """Whether the model's own group is freed after its forward, under a plan made by hand and when that is taken off."""
    found = []
    for frees_model in (None, True):
        training = Training(rank, Mlp, 1, frees_model=frees_model)
        applied = apply(make_plan(RANKS, 3), training.model, training.optimizer)
        training.losses(1)
        (group,) = param_groups(training.model)
        seen = [group.post_forward_mesh_info is not None]
        applied.remove()
        found.append((*seen, group.post_forward_mesh_info is not None))
    return found


@pytest.mark.timeout(100)
def test_a_plan_by_hand_frees_the_models_own_group_where_the_script_does():
    for found in run_ranks(freed_models, RANKS):
        assert found == [(False, False), (True, True)]
