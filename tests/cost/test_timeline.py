"""Lanes as a plan keeps them: what a page can show, and nothing moved or added."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.analyzers.intervals import length, minus, union
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.simulate import simulate
from memadvisor.cost.timeline import joined, timeline_of
from memadvisor.plan import LaneInterval, Plan
from memadvisor.write_schedule import write_schedule
from tests.make_run import make_run

TIMES = CollectiveTimes(kind="fitted", source="a test", curves={}, alpha_s=1e-4, beta_bytes_per_s=1e9)
STEP_S = 2.0  # so that shorter than 1 ms is short


def row(label, start_s, end_s, lane="compute"):
    return LaneInterval(lane, label, start_s, end_s)


def test_short_ones_of_one_kind_that_follow_each_other_are_drawn_as_one():
    rows = [row(f"forward of layers.{n}", n * 1e-4, (n + 1) * 1e-4) for n in range(50)]

    assert joined(rows, STEP_S) == [row("forward of several", 0.0, 50 * 1e-4)]


def test_long_ones_another_kind_and_another_lane_keep_what_they_are():
    rows = [
        row("forward of a", 0.0, 0.5),
        row("forward of b", 0.5, 1.0),
        row("forward of c", 1.0, 1.0001),
        row("backward of c", 1.0001, 1.0002),
        row("gather b", 0.0, 0.0002, "collective"),
    ]

    assert joined(rows, STEP_S) == rows


def test_what_goes_on_at_one_place_is_one():
    rows = [row("forward of a", 0.0, 0.3), row("forward of a", 0.3, 0.4), row("forward of a", 0.8, 0.9)]

    assert joined(rows, STEP_S) == [row("forward of a", 0.0, 0.4), row("forward of a", 0.8, 0.9)]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 1.99), st.floats(0, 0.01)), max_size=40))
def test_every_moment_stays_busy_and_only_gaps_too_narrow_to_be_seen_are_closed(drawn):
    rows = [row(f"{kind} of x", start_s, start_s + took_s) for kind, start_s, took_s in drawn]
    before = union((each.start_s, each.end_s) for each in rows)
    after = union((each.start_s, each.end_s) for each in joined(rows, STEP_S))

    assert minus(before, after) == ()
    assert all(length([gap]) < STEP_S / 2000 for gap in minus(after, before))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_of_a_simulation_it_ends_with_the_step_and_has_all_lanes(stage):
    step = captured_step(make_run())
    plan = Plan(num_ranks=2, zero_stage=stage, overlap=True, gather_depth=1)
    played = simulate(step, write_schedule(plan, step.units), TIMES)

    timeline = timeline_of(played)

    assert {each.lane for each in timeline} == {each.lane for each in played.lanes.intervals}
    assert max(e.end_s for e in timeline if e.lane == "compute") == pytest.approx(
        played.step_time_s, rel=1e-5
    )
    gathered = {each.label for each in timeline if each.label.startswith("gather blocks")}
    assert gathered == ({"gather blocks.0", "gather blocks.1", "gather blocks.2"} if stage else set())
