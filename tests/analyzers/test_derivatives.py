"""Losses made of a derivative: which units that concerns, what is said of them, and what checkpoints of theirs free."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memadvisor.analyzers.checkpointing import predicted_checkpoints
from memadvisor.analyzers.derivatives import differentiated_backwards, units_differentiated
from memadvisor.analyzers.segments import captured_step
from memadvisor.planning.advise import advise
from tests.planning.test_moved_activations import Gpt, recorded
from tests.planning.test_own_checkpoints import Around

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


class Interaction(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.softplus(self.up(x)))


class Potential(nn.Module):
    """Energies of places; `derivatives`: 1 for forces, 2 for their slopes too."""

    def __init__(self, derivatives=1, checkpointed=False, dim=32):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(Interaction(dim) for _ in BLOCKS)
        self.head = nn.Linear(dim, 1)
        self.derivatives, self.checkpointed = derivatives, checkpointed

    def forward(self, places):
        x = self.embed(places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)

    def loss(self):
        places = torch.rand(512, 3, requires_grad=True)
        found = self(places)
        total = found.square().mean()
        for _ in range(self.derivatives):
            (found,) = torch.autograd.grad(found.sum(), places, create_graph=True)
            total = total + (found - 1).square().mean()
        return total


class Forces(Potential):
    """Asks for them in its forward, as MACE does."""

    def forward(self, places):
        energy = super().forward(places)
        (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, forces

    def loss(self):
        energy, forces = self(torch.rand(512, 3, requires_grad=True))
        return energy.square().mean() + (forces - 1).square().mean()


class TwoLosses(Potential):
    """One graph, gone through for each of two losses; nothing is a derivative."""

    def loss(self):
        found = self(torch.rand(512, 3))
        found.mean().backward(retain_graph=True)
        return found.square().mean()


def notes(run, memory_bytes=10**6, **options):
    return [note for note in advise(run, memory_bytes=memory_bytes, **options).notes if "derivative" in note]


@pytest.mark.parametrize("kind", [Potential, Forces])
def test_units_that_a_derivative_goes_through_too_are_known(kind):
    """What several ranks hold between the two is not predicted."""
    run, _ = recorded(kind, 2, bf16=False)
    rank = run.ranks[0]

    assert len(differentiated_backwards(rank)) == 2
    assert set(BLOCKS) <= set(units_differentiated(rank))
    assert set(BLOCKS) <= set(captured_step(run).recomputable)
    assert set(BLOCKS).isdisjoint(captured_step(run, num_ranks=2).recomputable)


@pytest.mark.parametrize("kind", [Gpt, Around, TwoLosses])
def test_other_losses_have_none(kind):
    run, _ = recorded(kind, 2, bf16=False)

    assert not differentiated_backwards(run.ranks[0])
    assert units_differentiated(run.ranks[0]) == ()
    assert not notes(run)


@pytest.mark.parametrize("kind", [Potential, Forces])
def test_what_checkpoints_free_of_it_is_foretold(kind):
    """A note names it."""
    plain, losses = recorded(kind, 1, bf16=False)
    checkpointed, losses_checkpointed = recorded(partial(kind, checkpointed=True), 1, bf16=False)
    rows = {row.name: row for row in predicted_checkpoints(plain.ranks[0]).rows}

    assert losses == losses_checkpointed
    assert rows["blocks.*"].peak_saved_bytes > 0.05 * rows["blocks.*"].peak_bytes
    assert rows["blocks.*"].peak_bytes == pytest.approx(
        checkpointed.ranks[0].traced_step.peak_allocated_bytes, rel=0.01
    )


def test_of_several_derivatives_nothing_is_foretold():
    """Checkpoints raise the peak: each derivative's graph has copies of its own."""
    plain, _ = recorded(partial(Potential, 2), 1, bf16=False)
    assert not captured_step(plain).recomputable
    checkpointed, _ = recorded(partial(Potential, 2, checkpointed=True), 1, bf16=False)
    rows = {row.name: row for row in predicted_checkpoints(plain.ranks[0]).rows}
    (note,) = notes(plain)

    assert rows["blocks.*"].obstacle == "autograd goes through it more than twice"
    assert rows["blocks.*"].peak_bytes is None
    assert "not predicted" in note
    peaks = [run.ranks[0].traced_step.peak_allocated_bytes for run in (plain, checkpointed)]
    assert peaks[0] < peaks[1]
