"""Lanes and tables name where in a step something was."""

import dataclasses
from types import SimpleNamespace

from memadvisor.analyzers.communication import TrafficShare
from memadvisor.report.lanes import step_lanes
from memadvisor.report.traffic import unit_table
from memadvisor.report.view import RankView
from memadvisor.run.records import Span
from tests.make_run import make_run


def test_a_model_call_without_gradients_stands_in_the_phase_lane():
    """Its stretch was blank, as if nothing had run."""
    rank = make_run(num_ranks=1).ranks[0]
    step = rank.traced_step
    before = Span(
        step=step.index,
        kind="evaluation",
        unit="",
        micro_batch=0,
        start_s=step.start_s,
        end_s=step.start_s + 0.25,
        has_gradients=None,
    )
    recorded = dataclasses.replace(rank, spans=(before, *rank.spans))
    view = RankView(analysis=None, recorded=recorded, result=None, detail=100)
    phases, _ = step_lanes(view, 1.0, "y2")
    [drawn] = [number for number, text in enumerate(phases["text"]) if text == "evaluation"]

    assert (phases["base"][drawn], phases["x"][drawn]) == (0.0, 0.25)
    assert phases["marker"]["color"][drawn] == "var(--outside)"  # which the step's parts count it in


def test_a_unit_that_another_bar_lies_on_has_no_name_beneath_it():
    """The backward of a recomputed block was named in pieces, on both sides of its recomputation."""
    rank = make_run(num_ranks=1).ranks[0]
    step = rank.traced_step
    spans = tuple(
        Span(step.index, kind, "blocks.0", 0, step.start_s + start_s, step.start_s + end_s)
        for kind, start_s, end_s in (
            ("unit_forward", 0.0, 0.1),
            ("unit_backward", 0.2, 0.5),
            ("unit_recompute", 0.2, 0.3),
        )
    )
    recorded = dataclasses.replace(rank, spans=spans)
    _, units = step_lanes(RankView(analysis=None, recorded=recorded, result=None, detail=100), 1.0, "y2")

    assert units["text"] == ["blocks.0", "", "blocks.0"]
    assert units["insidetextfont"]["color"] == [
        "var(--on-forward)",
        "var(--on-backward)",
        "var(--on-recompute)",
    ]


def test_what_communicates_in_no_unit_is_named_as_in_the_terminal():
    """It was called (model), which is the root's own name."""
    shares = tuple(
        TrafficShare(
            name=name, bytes=8, num_calls=1, time_s=0.5, exposed_s=0.25, waiting_s=None, transfer_s=None
        )
        for name in ("blocks.0", "")
    )
    view = SimpleNamespace(
        result=SimpleNamespace(communication=SimpleNamespace(units=shares)), traced_basis="traced step 2"
    )
    found = unit_table(view).text

    assert "outside any unit" in found and "(model)" not in found
