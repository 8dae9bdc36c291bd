"""Splits of the micro-batch with activations on disk: found where they are of use, predicted, applied, and measured."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from memadvisor.analyzers.segments import captured_step
from memadvisor.planning.advise import advise
from memadvisor.planning.moved_splits import MovedSplits
from memadvisor.planning.plays import Plays
from memadvisor.planning.search import Search
from tests.planning.test_advise import MEASURED, run_of_four_samples
from tests.planning.test_moved_activations import DISK, LENGTH, VOCABULARY, Gpt, UNet, recorded
from tests.planning.test_offload import disk


class Words(Gpt):
    """18 samples, which halve once; what blocks keep of a half is large enough to be moved."""

    samples = 18

    def loss(self):
        words = torch.randint(VOCABULARY, (self.samples, LENGTH))
        return F.cross_entropy(self(words).flatten(0, 1), words.flatten())


class Maps(UNet):
    samples = 16

    def loss(self):
        return self(torch.randn(self.samples, 3, 32, 32)).square().mean()


def advised(run, budget_bytes, bytes_per_s=1e9):
    known = dataclasses.replace(MEASURED, disk=None if bytes_per_s is None else disk(bytes_per_s))
    return advise(run, memory_bytes=budget_bytes, hardware=known)


def least_moved(run, divisors):
    """The least peak of a split with activations on disk, where parameters stay."""
    search = Search(Plays(run, None, 1, 1, transfers=DISK))
    found = [
        plan
        for divisor in (1, *divisors)
        for plan in search.plans(captured_step(run, micro_batch_divisor=divisor))
    ]
    return min(ranked.prediction.peak_bytes for ranked in search.moved_splits(found))


@pytest.mark.parametrize(("kind", "divisors"), [(Words, (2,)), (Maps, (2, 4, 8))])
def test_where_nothing_else_fits_a_split_that_moves_is_found_and_does_what_was_foretold(kind, divisors):
    """Its peak within 1 % and every loss that of the split training without a plan; parameters stay where they are."""
    run, _ = recorded(kind, 1, False)
    plan = advised(run, least_moved(run, divisors)).best
    assert plan is not None and plan.micro_batch_size is not None
    part = type("Part", (kind,), {"samples": plan.micro_batch_size})
    _, losses = recorded(part, plan.grad_accum, False)
    applied, measured_losses = recorded(part, plan.grad_accum, False, plan)

    assert plan.grad_accum in divisors and "disk" in plan.activation_tiers
    assert plan.parameter_tiers == {"device"}
    assert measured_losses == losses
    measured_bytes = applied.ranks[0].traced_step.peak_allocated_bytes
    assert plan.prediction.peak_bytes == pytest.approx(measured_bytes, rel=0.01)
    assert plan.prediction.peak_bytes < advised(run, 1, None).smallest_budget_bytes


RUN = run_of_four_samples(num_blocks=4, vocabulary=64, sequence=512)
PEAK_BYTES = RUN.ranks[0].traced_step.peak_allocated_bytes


def moved_splits(advice):
    return [one for one in advice.plans if one.changes_script and one.plan.activation_tiers != {"device"}]


def test_a_split_that_moves_is_shown_where_it_is_clearly_faster_than_all_that_fits():
    budget_bytes = int(0.35 * PEAK_BYTES)
    fast, slow, without = (advised(RUN, budget_bytes, pace) for pace in (1e9, 1e7, None))
    (moved,) = moved_splits(fast)
    others = [
        one.prediction.step_time_s for one in (*fast.plans, *without.plans) if one.fits and one != moved
    ]

    assert moved.fits and moved.prediction.step_time_s < 0.95 * min(others)
    assert moved_splits(slow) == []


@pytest.mark.parametrize("share", [0.9, 0.6])
def test_none_is_looked_for_where_the_whole_micro_batch_is_as_fast(share, monkeypatch):
    """With units moved it takes as long as with nothing recomputed, and no split takes less."""
    tried = []
    monkeypatch.setattr(MovedSplits, "_with_moves", lambda self, *asked: tried.append(asked))
    advice = advised(RUN, int(share * PEAK_BYTES))

    assert advice.best is not None and not tried


@pytest.mark.parametrize("share", [0.5, 0.35, 0.3, 0.2])
@pytest.mark.parametrize("bytes_per_s", [3e7, 1e9])
def test_advice_is_never_worse_for_them(share, bytes_per_s, monkeypatch):
    budget_bytes = int(share * PEAK_BYTES)
    having = advised(RUN, budget_bytes, bytes_per_s)
    monkeypatch.setattr(MovedSplits, "plans", lambda self, known, best: iter(()))
    without = advised(RUN, budget_bytes, bytes_per_s)
    fastest = [
        min(one.prediction.step_time_s for one in each.plans if one.fits) for each in (having, without)
    ]

    assert fastest[0] <= fastest[1]
    assert having.smallest_budget_bytes <= without.smallest_budget_bytes
    assert having.plans[0].plan.units == without.plans[0].plan.units  # which leaves the script alone
