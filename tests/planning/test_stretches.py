"""Nested recomputation of a recorded model: predicted from the plain run, applied, and measured to the byte."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.cost.simulate import simulate
from memadvisor.engines.apply import apply
from memadvisor.plan import UnitPlan
from memadvisor.planning.advise import advise
from memadvisor.planning.rotor import Chain
from memadvisor.planning.stretches import NestedSearch, chain_of
from memadvisor.write_schedule import write_schedule
from tests.engines.activations.test_stretches import Mixed, Model
from tests.engines.trainings import Block, make_plan
from tests.planning.test_advise import MEASURED

NUM_BLOCKS = 12


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    losses = []
    for _ in range(4):
        loss = model(torch.randn(64, 16, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def make_model():
    torch.manual_seed(1)
    return Model([lambda: Mixed(Block(9, 0.1))] * NUM_BLOCKS)


def recorded(directory, plan=None):
    gc.collect()  # models of runs before this one that lie in cycles
    model = make_model()
    found = None if plan is None else apply(plan, model)
    try:
        with memadvisor.profile(directory, trace_step=1):
            losses = train(model)
    finally:
        if found is not None:
            found.remove()
    return memadvisor.load(directory), losses


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("plain") / "run")


def best(run, budget):
    return next(ranked for ranked in advise(run, memory_bytes=budget).plans if not ranked.changes_script)


def test_blocks_that_take_what_the_one_before_returns_are_a_chain(plain):
    run, _ = plain
    assert chain_of(captured_step(run)) == tuple(f"blocks.{number}" for number in range(NUM_BLOCKS))


def test_a_block_whose_backward_comes_with_another_micro_batch_is_in_no_chain(plain):
    """As of a critic whose gradient is asked for before the loss is known."""
    step = captured_step(plain[0])
    later = tuple(
        replace(s, micro_batch=1) if (s.phase, s.unit) == ("backward", "blocks.1") else s
        for s in step.segments
    )
    assert "blocks.1" not in chain_of(replace(step, segments=later))


def test_units_that_first_ran_in_another_order_than_in_the_captured_step_are_in_no_chain(plain):
    """As where blocks are left out at random: stretches are named by their ends in the order of first execution."""
    step = captured_step(plain[0])
    first = next(unit for unit in step.units if unit.name == "blocks.4")
    late = (*(unit for unit in step.units if unit is not first), first)

    assert chain_of(replace(step, units=late)) == tuple(f"blocks.{number}" for number in range(5, NUM_BLOCKS))


def test_a_unit_that_the_captured_step_left_out_is_in_no_stretch(plain):
    step = captured_step(plain[0])
    first = next(unit for unit in step.units if unit.name == "blocks.4")
    more = [
        other
        for unit in step.units
        for other in ((unit, replace(unit, name="left_out")) if unit is first else (unit,))
    ]

    assert chain_of(replace(step, units=tuple(more))) == tuple(f"blocks.{n}" for n in range(5, NUM_BLOCKS))


class Dropped(Model):
    """LayerDrop: the first step leaves out a block, with which the second begins."""

    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            if number != 1 or self.num_calls > 1:
                x = block(x)
        return self.head(x)


def test_blocks_that_are_left_out_at_random_have_plans(tmp_path):
    torch.manual_seed(1)
    model = Dropped([lambda: Mixed(Block(9, 0.1))] * NUM_BLOCKS)
    with memadvisor.profile(tmp_path / "run", trace_step=2):
        train(model)
    run = memadvisor.load(tmp_path / "run")
    peak_bytes = captured_step(run).peak_bytes

    assert captured_step(run).units[-1].name == "blocks.1"
    assert best(run, peak_bytes // 2).prediction.peak_bytes <= peak_bytes // 2


def test_the_smallest_budget_takes_nested_stretches_and_its_peak_is_measured_to_the_byte(plain, tmp_path):
    run, losses = plain
    peak_bytes = captured_step(run).peak_bytes
    ranked = best(run, peak_bytes // 100)  # nothing fits that
    again, measured_losses = recorded(tmp_path / "run", ranked.plan)

    assert ranked.plan.stretches
    assert measured_losses == losses
    assert again.ranks[0].traced_step.peak_allocated_bytes == ranked.prediction.peak_bytes


def test_no_table_of_the_programme_outlives_the_decision(plain, monkeypatch):
    """Each takes some 40 MB for 96 blocks, and a decision makes several."""
    tables = []

    def remembered(*given):
        table = Chain(*given)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr("memadvisor.planning.stretches.Chain", remembered)
    best(plain[0], captured_step(plain[0]).peak_bytes // 2)
    gc.collect()

    assert tables
    assert not any(table() for table in tables)


def test_chains_that_differ_in_what_is_there_all_the_time_share_a_table(plain):
    """As those of two ways of sharding do, of which one keeps more states."""
    tables, found = {}, []
    times = times_from_curves(MEASURED.collectives, 2, "a test")
    step = captured_step(plain[0])
    for states in (step.constant_state_bytes, Counter(step.constant_state_bytes) + Counter(parameter=10**6)):
        other = replace(step, constant_state_bytes=dict(states))

        def evaluate(nested, other=other):
            units = tuple(
                UnitPlan(name=unit.name, zero_stage=0, recompute=unit.name in nested.alone)
                for unit in other.units
            )
            plan = make_plan(2, 0, "chosen", units, stretches=nested.stretches)
            return simulate(other, write_schedule(plan, other.units), times)

        smallest = NestedSearch(other, evaluate, tables=tables).smallest()
        found.append((smallest, evaluate(smallest).peak_bytes))

    assert found[1] == (found[0][0], found[0][1] + 10**6)
    assert len(tables) == 1


def test_a_plan_that_needs_less_than_every_unit_by_itself_is_found_and_more_memory_is_never_slower(plain):
    run, _ = plain
    smallest = best(run, 1).prediction.peak_bytes
    plain_bytes = captured_step(run).peak_bytes
    budgets = [smallest + (plain_bytes - smallest) * fifth // 5 for fifth in range(6)]
    ranked = [best(run, budget) for budget in budgets]

    assert all(found.fits for found in ranked)
    assert ranked[0].plan.stretches and not ranked[-1].plan.recomputed_units
    times = [found.prediction.step_time_s for found in ranked]
    assert all(
        late <= early * (1 + 3e-3) for early, late in pairwise(times)
    )  # what is not worth keeping operators


@pytest.mark.parametrize("which", [slice(None), slice(0, None, 2), slice(1, None, 3)])
def test_what_units_keep_of_their_operators_is_predicted_to_the_byte(plain, tmp_path, which):
    run, losses = plain
    step = captured_step(run)
    kept = {
        step.segments[position].unit: tuple(each.name for each in operators.operators[which])
        for position, operators in step.operators.items()
    }
    units = tuple(
        UnitPlan(name=u.name, zero_stage=0, recompute=u.name in kept, kept=kept.get(u.name, ()))
        for u in step.units
    )
    plan = make_plan(1, 0, "chosen", units)
    predicted = simulate(step, write_schedule(plan, step.units), None)
    again, measured_losses = recorded(tmp_path / "run", plan)

    assert sum(len(names) for names in kept.values()) >= NUM_BLOCKS
    assert measured_losses == losses
    assert again.ranks[0].traced_step.peak_allocated_bytes == predicted.peak.total_bytes
