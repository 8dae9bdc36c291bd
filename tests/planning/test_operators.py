"""What recomputed units keep: the curve against all subsets, the programme against all choices of all units."""

from dataclasses import replace
from itertools import chain, combinations, product

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.kept import KeepableOperator, KeepableStorage
from memadvisor.cost.second_run import SecondRunCost
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.planning.operators import OperatorSearch, curve
from memadvisor.planning.recompute import choose_recomputed
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import TIMES, plan
from tests.make_run import make_run


def evaluator(step, stage=0):
    known = {}

    def evaluate(selection):
        key = frozenset(selection.items())
        if key not in known:
            units = tuple(
                UnitPlan(
                    name=unit.name,
                    zero_stage=stage,
                    recompute=unit.name in selection,
                    kept=selection.get(unit.name, ()),
                )
                for unit in step.units
            )
            made = plan(ranks=2 if stage else 1, stage=stage, units=units)
            known[key] = simulate(step, write_schedule(made, step.units), TIMES)
        return known[key]

    return evaluate


def operator(number, size_bytes, seconds, is_random):
    storage = KeepableStorage(category="activation", size_bytes=size_bytes, death_segment=None)
    return KeepableOperator(name=f"op#{number}", seconds=seconds, is_random=is_random, storages=(storage,))


def subsets(items):
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9), st.booleans()), min_size=1, max_size=7))
@settings(max_examples=100, deadline=None)
def test_no_subset_spares_more_with_as_few_bytes_and_numbers_are_drawn_all_or_none(rows):
    operators = [operator(number, *row) for number, row in enumerate(rows)]
    random = {o.name for o in operators if o.is_random}
    choices = curve(operators, max_points=1000)
    sizes = [choice.size_bytes for choice in choices]

    assert sizes == sorted(set(sizes)) and choices[0].names == ()
    for choice in choices:
        assert random <= set(choice.names) or not random & set(choice.names)
    for subset in subsets(operators):
        names = {o.name for o in subset}
        if random <= names or not random & names:
            within = [c for c in choices if c.size_bytes <= sum(o.size_bytes for o in subset)]
            assert max(c.seconds for c in within) >= sum(o.seconds for o in subset)


def test_few_points_are_those_that_spare_most_for_a_byte_and_the_ends():
    operators = [operator(number, 10 + number, 1.0 / (1 + number), False) for number in range(12)]
    choices = curve(operators, max_points=5)

    assert len(choices) <= 5
    assert (choices[0].names, len(choices[-1].names)) == ((), 12)
    assert [len(choice.names) for choice in curve(operators, max_points=2)] == [0, 12]


@given(
    shape=st.sampled_from([(2, 1, 0), (1, 2, 0), (1, 1, 2), (1, 1, 3)]),
    share=st.floats(0, 1),
    head_s=st.floats(0.001, 0.05),
    looked_at_s=st.sampled_from([0.0, 1e-4, 1e-3]),
)
@settings(max_examples=8, deadline=None, phases=[Phase.generate])
def test_no_choice_of_units_and_of_what_they_keep_is_faster(shape, share, head_s, looked_at_s):
    """Every unit as it is or recomputed with any subset of its operators: all of them simulated."""
    blocks, batches, stage = shape
    step = captured_step(make_run(num_blocks=blocks, num_micro_batches=batches, head_s=head_s))
    step = replace(step, second_run_cost=SecondRunCost(call_s=0.0, tensor_s=0.0, operator_s=looked_at_s))
    evaluate = evaluator(step, stage)
    options = {unit: [None, ()] for unit in step.recomputable}
    for position, operators in step.operators.items():
        names = [each.name for each in operators.operators]
        options[step.segments[position].unit] = [None, *subsets(names)]
    results = []
    for chosen in product(*options.values()):
        selection = {u: names for u, names in zip(options, chosen, strict=True) if names is not None}
        results.append(evaluate(selection))
    low, high = min(r.peak.total_bytes for r in results), evaluate({}).peak.total_bytes
    budget = int(low + share * (high - low))
    fastest_s = min(r.step_time_s for r in results if r.peak.total_bytes <= budget)
    plain_s = evaluate({}).step_time_s

    selection = OperatorSearch(step, evaluate).fastest(budget)

    found = evaluate(selection)
    assert found.peak.total_bytes <= budget
    assert found.step_time_s - plain_s <= (fastest_s - plain_s) * 1.01 + 1e-9


@pytest.mark.parametrize("stage", [0, 3])
def test_it_is_never_slower_than_units_that_keep_nothing(stage):
    step = captured_step(make_run(num_blocks=6, num_micro_batches=2))
    evaluate = evaluator(step, stage)
    search = OperatorSearch(step, evaluate)
    high = evaluate({}).peak.total_bytes
    for budget in range(high * 7 // 10, high, high // 10):
        alone = choose_recomputed(step, lambda units: evaluate(dict.fromkeys(units, ())), budget)
        found = search.fastest(budget)
        if alone is not None:
            assert evaluate(found).peak.total_bytes <= budget
            assert evaluate(found).step_time_s <= alone.simulation.step_time_s * (1 + 1e-9)


def test_a_budget_below_every_choice_has_none_and_one_above_the_peak_asks_for_nothing():
    step = captured_step(make_run())
    evaluate = evaluator(step)
    search = OperatorSearch(step, evaluate)
    assert search.fastest(1000) is None
    assert search.fastest(evaluate({}).peak.total_bytes) == {}
