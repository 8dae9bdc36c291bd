"""The choice of recomputed units, against trying every subset."""

import dataclasses
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.planning.recompute import choose_recomputed, smallest_peak
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES, plan
from tests.make_run import make_run


def evaluator(step, stage=0):
    known = {}

    def evaluate(units):
        if units not in known:
            made = plan(ranks=2 if stage else 1, stage=stage, recompute=sorted(units))
            known[units] = simulate(step, write_schedule(made, step.units), TIMES)
        return known[units]

    return evaluate


def every_subset(step):
    names = sorted(step.recomputable)
    return [frozenset(c) for size in range(len(names) + 1) for c in combinations(names, size)]


@given(
    blocks=st.integers(1, 5),
    stage=st.sampled_from([0, 2, 3]),
    share=st.floats(0, 1),
    head_s=st.floats(0.001, 0.05),
    vocabulary=st.sampled_from([64, 512]),
)
@settings(max_examples=25, deadline=None)
def test_no_subset_within_the_budget_is_faster(blocks, stage, share, head_s, vocabulary):
    """Up to seven units, all 128 subsets, budgets from the smallest peak to the plain one."""
    step = captured_step(make_run(num_blocks=blocks, head_s=head_s, vocabulary=vocabulary))
    evaluate = evaluator(step, stage)
    results = {units: evaluate(units) for units in every_subset(step)}
    low = min(result.peak.total_bytes for result in results.values())
    high = results[frozenset()].peak.total_bytes
    budget = int(low + share * (high - low))
    fastest = min(r.step_time_s for r in results.values() if r.peak.total_bytes <= budget)

    choice = choose_recomputed(step, evaluate, budget)

    assert choice is not None and choice.peak_bytes <= budget
    assert choice.simulation.step_time_s == pytest.approx(fastest)


@given(blocks=st.integers(1, 5), stage=st.sampled_from([0, 3]), batches=st.integers(1, 2))
@settings(max_examples=15, deadline=None)
def test_no_subset_has_a_lower_peak_than_the_smallest(blocks, stage, batches):
    step = captured_step(make_run(num_blocks=blocks, num_micro_batches=batches))
    evaluate = evaluator(step, stage)
    lowest = min(evaluate(units).peak.total_bytes for units in every_subset(step))

    assert smallest_peak(step, evaluate).peak_bytes == lowest


def test_a_budget_below_every_subset_has_no_choice():
    step = captured_step(make_run())
    evaluate = evaluator(step)
    assert choose_recomputed(step, evaluate, smallest_peak(step, evaluate).peak_bytes - 1) is None


def test_sixty_blocks_are_solved_within_a_few_hundred_simulations():
    step = captured_step(make_run(num_blocks=60))
    evaluate = evaluator(step)
    count = 0

    def counting(units):
        nonlocal count
        count += 1
        return evaluate(units)

    everything = evaluate(frozenset(step.recomputable))
    budget = (everything.peak.total_bytes + evaluate(frozenset()).peak.total_bytes) // 2
    choice = choose_recomputed(step, counting, budget)

    assert choice is not None and choice.peak_bytes <= budget
    assert count < 400


def test_what_belongs_to_no_unit_of_the_plan_is_left_alone():
    """A tied head owns no parameters, so that it is no unit, though it keeps tensors of its own."""
    step = captured_step(make_run())
    known = {unit: seconds for unit, seconds in step.recomputable.items() if unit != "head"}
    assert len(known) < len(step.recomputable)
    step = dataclasses.replace(step, recomputable=known)

    assert "head" not in smallest_peak(step, evaluator(step)).recomputed
