"""What the engine itself takes is added to the simulated step, kind by kind."""

from dataclasses import fields, replace

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.moved_activations import Moves, units_away
from memadvisor.cost.simulate import simulate
from memadvisor.cost.stretches import Stretches
from memadvisor.cost.transfers import TransferTimes
from memadvisor.engines import paging_cost
from memadvisor.engines.cost_fit import least_squares
from memadvisor.engines.engine_cost import _counts, _rows
from memadvisor.hardware.hardware import EngineCost, PagingCost, TierBandwidth
from memadvisor.schedule import Lane
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import plan
from tests.make_run import make_run

# Of collectives that take next to nothing, so that nothing is waited for.
TIMES = CollectiveTimes(kind="fitted", source="a test", curves={}, alpha_s=1e-12, beta_bytes_per_s=1e18)
KINDS = [field.name for field in fields(EngineCost)]
NOTHING = EngineCost(**dict.fromkeys(KINDS, 0.0))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_kind_of_work_is_played_as_often_as_calibrate_counts_it(stage):
    step = captured_step(make_run(num_ranks=2, num_blocks=4))
    schedule = write_schedule(plan(ranks=2, stage=stage, overlap=True, depth=int(stage == 3)), step.units)
    num_parameters = sum(len(states.parameters) for states in step.states.values())

    def step_s(engine):
        return simulate(step, schedule, replace(TIMES, engine=engine)).step_time_s

    found = [step_s(replace(NOTHING, **{kind: 1e-3})) - step_s(NOTHING) for kind in KINDS]
    assert found == pytest.approx([1e-3 * n for n in _counts(stage, len(step.units), num_parameters)])


def test_a_step_of_one_process_has_no_engine_in_it():
    step = captured_step(make_run(num_ranks=1))
    schedule = write_schedule(plan(), step.units)
    known = replace(TIMES, engine=replace(NOTHING, gradient_s=1.0))
    assert simulate(step, schedule, known).step_time_s == simulate(step, schedule, None).step_time_s


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_so_is_what_paging_takes_in_one_process(micro_batches):
    run = make_run(num_ranks=1, num_blocks=4, num_micro_batches=micro_batches)
    step = captured_step(run)
    paged = replace(plan(stage=3, overlap=True, depth=1), optimizer_tier="disk", parameter_tier="disk")
    schedule = write_schedule(paged, step.units)
    fast = TierBandwidth(read_bytes_per_s=1e18, write_bytes_per_s=1e18)
    num_parameters = sum(len(states.parameters) for states in step.states.values())
    kinds = [field.name for field in fields(PagingCost)]
    nothing = PagingCost(**dict.fromkeys(kinds, 0.0))

    def step_s(paging):
        times = TransferTimes({Lane.DISK: fast}, "a test", paging=paging)
        return simulate(step, schedule, None, transfers=times).step_time_s

    found = [step_s(replace(nothing, **{kind: 1e-3})) - step_s(nothing) for kind in kinds]
    counts = paging_cost._counts(len(step.units), num_parameters, micro_batches)
    assert found == pytest.approx([1e-3 * sum(each) for each in zip(*counts, strict=True)])


def test_what_moving_activations_takes_is_half_on_the_way_out_and_half_on_the_way_back():
    step = captured_step(make_run(num_ranks=1, num_blocks=4))
    schedule = write_schedule(replace(plan(), activation_tier="disk", overlap=True), step.units)
    moves = Moves(step, units_away(schedule), Stretches(schedule.stretches))
    ways = [way for moved in (moves.written, moves.read) for way in moved.values()]
    fast = TierBandwidth(read_bytes_per_s=1e18, write_bytes_per_s=1e18)

    def step_s(moved_s):
        paging = PagingCost(transfer_s=1.0, shown_s=1.0, update_s=1.0, moved_s=moved_s)
        times = TransferTimes({Lane.DISK: fast}, "a test", paging=paging)
        return simulate(step, schedule, None, transfers=times).step_time_s

    assert ways
    assert step_s(1e-3) - step_s(0.0) == pytest.approx(5e-4 * sum(way.num_storages for way in ways))


def test_what_each_kind_takes_is_found_from_sums_and_never_less_than_nothing():
    trained = [_counts(stage, n, m) for stage in (0, 1, 3) for n, m in ((2, 8), (8, 32), (4, 64))]
    counts = [row for each in trained for row in _rows(each)]
    each_s = [1e-6, 1e-4, 3e-4, 2e-5, 3e-5]
    exact = [sum(n * s for n, s in zip(row, each_s, strict=True)) for row in counts]
    assert least_squares(KINDS, counts, exact) == pytest.approx(dict(zip(KINDS, each_s, strict=True)))

    less = [spent - 5e-6 * row[0] for row, spent in zip(counts, exact, strict=True)]
    found = least_squares(KINDS, counts, less)
    assert found["gradient_s"] == 0 and min(found.values()) >= 0
