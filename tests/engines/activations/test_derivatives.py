"""Recomputed units in a loss that is made of a derivative, and in a graph that is walked twice: they run again for each backward,
and hold nothing between."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from memadvisor.plan import UnitPlan
from tests.analyzers.test_derivatives import BLOCKS, Forces, Potential, TwoLosses
from tests.engines.trainings import Noted, applied, make_plan
from tests.planning.test_moved_activations import BATCH, LENGTH, VOCABULARY, Gpt, recorded

ALL = make_plan(1, policy="every-layer")
STRETCH = make_plan(
    1,
    policy="chosen",
    units=tuple(UnitPlan(name=name, zero_stage=0, recompute=False) for name in ("embed", *BLOCKS, "head")),
    stretches=((BLOCKS[0], BLOCKS[2]), (BLOCKS[1], BLOCKS[2])),
)


def parted(recompute):
    units = [UnitPlan(name=name, zero_stage=0, recompute=False) for name in ("embed", "head")]
    units += [
        UnitPlan(name=name, zero_stage=0, recompute=recompute, parts=((f"{name}.up",),)) for name in BLOCKS
    ]
    return make_plan(1, policy="chosen", units=tuple(units))


@pytest.mark.parametrize("plan", [ALL, STRETCH, parted(True), parted(False)])
@pytest.mark.parametrize("kind", [Potential, Forces, partial(Potential, 2)])
def test_losses_are_bitwise_those_of_the_plain_run(kind, plan):
    _, plain = recorded(kind, 2, bf16=False)
    _, ours = recorded(kind, 2, bf16=False, plan=plan)

    assert ours == plain


@pytest.mark.parametrize("kind", [Potential, Forces])
def test_the_peak_is_that_of_checkpoints_written_into_the_script(kind):
    """What the derivative has asked for is not held until the loss's backward asks for it again."""
    runs = [
        recorded(kind, 1, bf16=False),
        recorded(partial(kind, checkpointed=True), 1, bf16=False),
        recorded(kind, 1, bf16=False, plan=ALL),
    ]
    plain, checkpointed, ours = (run.ranks[0].traced_step.peak_allocated_bytes for run, _ in runs)

    assert ours < 0.95 * plain
    assert ours == pytest.approx(checkpointed, rel=0.02)


class Species(nn.Module):
    """Adds what does not depend on its input, so that no derivative by that asks for it."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(9, 9), nn.Linear(9, 9)
        self.made = Noted()

    def forward(self, x):
        own = self.table(torch.ones(5, 9)).square()
        self.made.append(StorageWeakRef(own.untyped_storage()))
        return torch.tanh(self.linear(x)) + own.square()


@pytest.mark.parametrize("create_graph", [True, False])
def test_what_a_walk_of_a_kept_graph_does_not_ask_for_goes_with_its_end(create_graph):
    with applied(make_plan(1, policy="every-layer")):
        model = nn.Sequential(Species(), Species())
        torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(5, 9, requires_grad=True)
        energy = model(x).sum()
        torch.autograd.grad(energy, x, create_graph=create_graph, retain_graph=True)

    assert [len(module.made) for module in model] == [2, 2]
    assert all(module.made[-1].expired() for module in model)


class Twice(Gpt):
    """Two losses of one graph, gone through one after the other."""

    def __init__(self, checkpointed=False):
        super().__init__()
        if checkpointed:
            self.blocks = nn.ModuleList(Checkpointed(block) for block in self.blocks)

    def loss(self):
        words = torch.randint(VOCABULARY, (BATCH, LENGTH))
        found = self(words)
        F.cross_entropy(found.flatten(0, 1), words.flatten()).backward(retain_graph=True)
        return found.square().mean()


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *given):
        return checkpoint(self.block, *given, use_reentrant=False)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_graph_that_is_walked_twice_takes_what_checkpoints_written_into_the_script_do(num_micro_batches):
    """And each walk runs the blocks again: what the first one's run made is not held for the next."""
    plain, *others = [
        recorded(Twice, num_micro_batches, bf16=False),
        recorded(partial(Twice, checkpointed=True), num_micro_batches, bf16=False),
        recorded(Twice, num_micro_batches, bf16=False, plan=ALL),
    ]
    plain_bytes, checkpointed, ours = (
        run.ranks[0].traced_step.peak_allocated_bytes for run, _ in (plain, *others)
    )

    assert all(losses == plain[1] for _, losses in others)
    assert ours == checkpointed < 0.5 * plain_bytes


@pytest.mark.parametrize("plan", [STRETCH, parted(True), parted(False)])
def test_losses_are_bitwise_equal_also_of_stretches_and_parts_whose_graph_is_walked_twice(plan):
    _, plain = recorded(TwoLosses, 2, bf16=False)
    _, ours = recorded(TwoLosses, 2, bf16=False, plan=plan)

    assert ours == plain
