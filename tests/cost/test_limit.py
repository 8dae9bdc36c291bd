"""Steps that are played no further than to where it is certain that they pass a limit."""

import dataclasses

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.cost.limit import LeastTime, Limit
from memadvisor.cost.simulate import simulate
from memadvisor.plan import UnitPlan
from memadvisor.planning.arrangement import Arrangement, space_of
from memadvisor.planning.outcomes import Outcome, Outcomes
from memadvisor.planning.plays import Plays
from memadvisor.write_schedule import write_schedule
from tests.cost.test_simulate import plan
from tests.make_run import make_run
from tests.planning.test_advise import MEASURED

STEP = captured_step(make_run(num_blocks=2))
TIMES = times_from_curves(MEASURED.collectives, 2, "a test")


def played(units, limit=None, step=STEP):
    made = plan(ranks=2, units=units, overlap=True, depth=1)
    return simulate(step, write_schedule(made, step.units), TIMES, limit=limit)


ARRANGEMENTS = [arrangement.units for arrangement in list(space_of(STEP).all())[::997]]


def test_a_step_that_passes_no_limit_is_played_to_its_end():
    for units in ARRANGEMENTS:
        whole = played(units)
        again = played(units, Limit(whole.step_time_s * (1 + 1e-9), whole.peak_bytes))

        assert again.is_whole
        assert (again.step_time_s, again.peak_bytes) == (whole.step_time_s, whole.peak_bytes)


def test_a_step_that_is_cut_short_passes_the_limit_and_says_no_more_than_it_takes():
    num_cut = 0
    for units in ARRANGEMENTS:
        whole = played(units)
        for limit in (Limit(peak_bytes=whole.peak_bytes - 1), Limit(whole.step_time_s * 0.9)):
            short = played(units, limit)
            num_cut += not short.is_whole

            assert short.is_whole or limit.is_passed_by(short.step_time_s, short.peak_bytes)
            assert short.step_time_s <= whole.step_time_s * (1 + 1e-9)
            assert short.peak_bytes <= whole.peak_bytes
    assert num_cut > len(ARRANGEMENTS)


def test_second_forwards_alone_are_time_enough_to_cut_a_step_before_its_first_segment():
    units = tuple(
        UnitPlan(name=u.name, zero_stage=0, recompute=u.name in STEP.recomputable) for u in STEP.units
    )
    nothing = tuple(UnitPlan(name=u.name, zero_stage=0, recompute=False) for u in STEP.units)
    short = played(units, Limit(sum(segment.duration_s for segment in STEP.segments)))

    assert not short.is_whole
    assert not list(short.moments)
    assert played(nothing).is_whole


def test_no_step_takes_less_than_the_least_that_is_known_before_it_is_played():
    least = LeastTime(STEP)
    for units in ARRANGEMENTS:
        nothing = [dataclasses.replace(unit, recompute=False) for unit in units]
        whole = [dataclasses.replace(unit, zero_stage=0) for unit in units]

        assert least.seconds(units, 2) <= played(units).step_time_s * (1 + 1e-9)
        assert 0 < least.seconds(nothing, 2) <= least.seconds(units, 2) <= least.seconds(whole, 2)
    optimizer_s = sum(STEP.segments[position].duration_s for position in STEP.optimizer_at)
    shared = [UnitPlan(name=unit.name, zero_stage=3, recompute=False) for unit in STEP.units]
    alone_s = sum(segment.duration_s for segment in STEP.segments)
    assert least.seconds(shared, 4) == pytest.approx(alone_s - optimizer_s * 3 / 4)


def test_what_takes_too_long_at_the_least_or_more_memory_than_it_may_is_not_played(monkeypatch):
    """What it has in memory is known once a step was played whose states are the same."""
    asked = []

    def counted(*given, **named):
        asked.append(given)
        return simulate(*given, **named)

    monkeypatch.setattr("memadvisor.planning.plays.simulate", counted)
    plays = Plays(make_run(num_blocks=2), TIMES, 2, budget_bytes=0)
    nothing, everything = (
        Arrangement(
            tuple(UnitPlan(name=u.name, zero_stage=2, recompute=u.name in again) for u in STEP.units), True, 1
        )
        for again in ((), STEP.recomputable)
    )
    least_s = plays.least_s(STEP, everything)

    assert plays.outcome(STEP, everything, Limit(least_s)) == Outcome(least_s, 0, is_whole=False)
    assert not asked
    lowest = plays.outcome(STEP, everything, None)
    assert lowest.is_whole
    over = plays.outcome(STEP, nothing, Limit(peak_bytes=lowest.peak_bytes))
    assert len(asked) == 1
    assert not over.is_whole
    assert over.peak_bytes == plays.play(STEP, nothing).peak_bytes > lowest.peak_bytes


def test_of_a_step_whose_parts_were_learnt_to_take_another_time_memory_alone_is_known_before_its_end():
    learnt = dataclasses.replace(STEP, time_factors={"compute": 0.5})
    units = ARRANGEMENTS[0]

    assert played(units, Limit(played(units).step_time_s * 0.9), learnt).is_whole
    assert not played(units, Limit(peak_bytes=1), learnt).is_whole


def test_what_was_cut_short_is_played_again_where_a_limit_asks_for_more():
    asked = []

    def play(units, limit):
        asked.append(limit)
        found = played(units, limit)
        return Outcome(found.step_time_s, found.peak_bytes, found.is_whole)

    outcomes = Outcomes(play)
    units = ARRANGEMENTS[0]
    whole = played(units)
    low, lower = Limit(peak_bytes=1000), Limit(peak_bytes=10)

    assert not outcomes(units, low).is_whole
    assert not outcomes(units, lower).is_whole
    assert asked == [low]
    assert outcomes(units) == Outcome(whole.step_time_s, whole.peak_bytes)
    assert outcomes(units, low).is_whole
    assert asked == [low, None]
