"""The first answer of the page: what became of the peak and of the step, and what a plan had promised."""

from __future__ import annotations

from typing import Any

from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.run_difference import RankDifference, RunDifference
from memadvisor.report.blocks import Html
from memadvisor.report.difference_view import PairView
from memadvisor.report.difference_words import NOT_RECORDED, Form, shift_in_words, texts
from memadvisor.report.escape import prose
from memadvisor.report.headline import card, cards
from memadvisor.report.plan_effect import plan_card
from memadvisor.report.words import place_name
from memadvisor.units import format_bytes, format_change, format_seconds


def title_of_difference(found: RunDifference) -> str:
    """`Peak 279 MiB -> 176 MiB (-37.0 %), step 943 ms -> 961 ms (+1.9 %)`."""
    rank = found.largest_rank
    if rank is None:
        return "Two runs that share no rank"
    told = [
        f"{name} {_arrow(change, form)}"
        for name, change, form in (
            ("peak", rank.known_peak_bytes, format_bytes),
            ("step", rank.step_time.median_s, format_seconds),
        )
        if change.before is not None or change.after is not None
    ]
    said = ", ".join(told)
    return said[:1].upper() + said[1:] if told else "Two runs without a peak or a timed step"


def _arrow(change: Change[Any], form: Form) -> str:
    before, after, _, share = texts(change, form)
    return f"{before} → {after}" + (f" ({share})" if share else "")


def difference_cards(view: PairView) -> Html:
    return Html(f"{cards(_peak(view.rank, view.of_rank), _step(view.rank, view.of_rank))}{_plan(view)}")


def _peak(rank: RankDifference, of_rank: str) -> str:
    before, after = (NOT_RECORDED if place is None else place_name(place) for place in rank.peak_position)
    where = f"in {before}" if before == after else f"before in {before}, after in {after}"
    return _change_card("Peak memory", rank.peak_bytes, format_bytes, f"{where}; the traced steps{of_rank}")


def _step(rank: RankDifference, of_rank: str) -> str:
    told = shift_in_words(rank.step_time)
    said = "" if told is None else f"; {told.said}"
    return _change_card("Step time", rank.step_time.median_s, format_seconds, f"steady steps{of_rank}{said}")


def _change_card(name: str, change: Change[Any], form: Form, basis: str) -> str:
    """The change in large, and both sides of it."""
    before, after, difference, _ = texts(change, form)
    fraction = change.change_fraction
    if change.before is None and change.after is None:
        return card(name, None, basis, "")
    value = difference if fraction is None or difference == "same" else format_change(fraction)
    return card(name, f"{before} → {after}" if value == "-" else value, f"{before} → {after}; {basis}", "")


def _plan(view: PairView) -> str:
    """What the plan of the run after had promised, in the rank that the promise is of, and what does not compare."""
    if view.planned is None:
        return ""
    said = "".join(f"<li>{prose(text)}</li>" for text in view.planned.remarks)
    remarks = (
        f'<div class="card next"><span class="name">What does not compare</span><ul>{said}</ul></div>'
        if said
        else ""
    )
    return plan_card(view.found.after) + remarks
