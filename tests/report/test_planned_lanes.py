"""The figure of predicted and measured lanes."""

import dataclasses

from memadvisor.analyzers.analysis import analyze
from memadvisor.plan import LaneInterval
from memadvisor.report.blocks import Figure, Missing
from memadvisor.report.page import render
from memadvisor.report.planned_lanes import lanes_figure
from tests.analyzers.test_planned_lanes import PLAN, STAGES, TIMELINE
from tests.make_run import make_run


def figure_of(plan=PLAN, **changes):
    (block,) = lanes_figure(analyze(make_run(plan=plan, **changes)))
    return block


def test_predicted_stands_above_measured_in_each_lane_on_one_axis_of_time():
    figure = figure_of()

    assert figure.kinds == ("predicted", "measured")
    assert figure.layout["yaxis"]["ticktext"] == [
        "compute<br>predicted: 80.0 ms",
        "compute<br>step 5: 102 ms",
        "compute<br>traced step 3: 302 ms",
        "collectives<br>predicted",
        "collectives<br>traced step 3",
    ]
    assert figure.layout["xaxis"]["range"][1] > 302
    hatched = ["pattern" in trace["marker"] for trace in figure.traces]
    assert hatched == [True, False, False, True, False]


def test_a_hover_names_whose_it_is_the_action_the_unit_and_when():
    figure = figure_of()

    assert figure.traces[0]["hovertext"][1] == "predicted: backward of blocks.0, 50.0 ms from 30.0 ms on"
    assert "predicted: reduce blocks.0, 20.0 ms from 50.0 ms on" in figure.traces[3]["hovertext"]
    assert any(
        text.startswith("measured, traced step 3: all_reduce") for text in figure.traces[4]["hovertext"]
    )


def test_a_line_says_how_far_off_step_and_exposed_communication_are():
    """80 ms predicted, 102 ms measured; 1 ms of exposed communication, and 2 ms of the traced step's 302 ms, of 102 ms."""
    figure = figure_of()

    assert figure.note.startswith(
        "Step: predicted 80.0 ms, measured 102 ms (21.6 % too short). "
        "Exposed communication: predicted 1.00 ms, measured 675 us (48.0 % too long)."
    )
    assert "transfers to and from a disk, are seen in the traced step alone" in figure.note


def test_what_is_not_measured_says_so_in_its_row_and_below():
    timeline = (*TIMELINE, LaneInterval("disk", "offload of blocks.0", 0.0, 0.01))
    figure = figure_of(dataclasses.replace(PLAN, timeline=timeline))

    assert [note["text"] for note in figure.layout["annotations"]] == ["not measured"]
    assert "Disk: not measured, as what the disk transfers is not recorded." in figure.note


def test_a_plan_without_lanes_says_why_and_one_that_predicts_nothing_says_nothing_of_them():
    older = figure_of(dataclasses.replace(PLAN, timeline=None))

    assert isinstance(older, Missing)
    assert "a version that did not keep its lanes" in older.why
    assert lanes_figure(analyze(make_run())) == []
    by_hand = dataclasses.replace(PLAN, timeline=None, prediction=None)
    assert lanes_figure(analyze(make_run(plan=by_hand))) == []


def test_names_stay_text():
    timeline = (LaneInterval("compute", "forward of <b>x</b>\x1b", 0.0, 0.08),)
    figure = figure_of(dataclasses.replace(PLAN, timeline=timeline))

    assert isinstance(figure, Figure)
    assert figure.traces[0]["hovertext"] == [
        "predicted: forward of &lt;b&gt;x&lt;/b&gt;\\x1b, 80.0 ms from 0 s on"
    ]
    assert "<b>x</b>" not in render(analyze(make_run(plan=dataclasses.replace(PLAN, timeline=timeline))))


def test_of_a_pipeline_each_rank_has_its_rows_and_the_note_says_how_they_begin():
    figure = figure_of(STAGES, num_micro_batches=2)

    ticks = figure.layout["yaxis"]["ticktext"]
    assert [tick.partition(":")[0] for tick in ticks[:2]] == ["rank 0<br>predicted", "rank 0<br>step 5"]
    assert "rank 1<br>predicted: 80.0 ms" in ticks
    assert "Exposed communication" not in figure.note
    assert "a measured row begins with its own rank's step" in figure.note
    assert "0" in figure.traces[1]["text"]
