"""Losses that are made of a derivative: what a step's backwards have made themselves, for a later one to go through.

`torch.autograd.grad(energy, positions, create_graph=True)`: forces, gradient penalties, equations that a network solves.
What units' forwards keep is asked for by that backward, and once more by the loss's.
"""

from __future__ import annotations

from itertools import pairwise

from memadvisor.run.records import Span
from memadvisor.run.run import RankRun


def differentiated_backwards(rank: RankRun) -> tuple[Span, ...]:
    """The backwards of the traced step in which autograd has kept what a later one lets go of, in order.

    What a checkpoint's second forward keeps is for the backward that it is run in.
    """
    step = rank.traced_step
    if step is None:
        return ()
    backwards = sorted(
        (span for span in rank.spans if span.step == step.index and span.kind == "backward"),
        key=lambda span: span.start_s,
    )
    again = [call for call in rank.module_calls if call.phase == "recompute"]
    return tuple(
        span
        for span, following in pairwise(backwards)
        if any(
            not any(call.start_s <= row.saved_s <= call.end_s for call in again)
            for row in rank.saved
            if span.start_s <= row.saved_s <= span.end_s and (row.released_s or 0.0) >= following.start_s
        )
    )


def units_differentiated(rank: RankRun) -> tuple[str, ...]:
    """Units whose backward runs in such a one, and that keep something of before it until a later one, in the model's
    order."""
    found: set[str] = set()
    for span in differentiated_backwards(rank):
        through = {
            own.unit
            for own in rank.spans
            if own.kind == "unit_backward" and span.start_s <= own.start_s < span.end_s
        }
        found |= {
            row.unit
            for row in rank.saved
            if row.unit in through and row.saved_s < span.start_s and (row.released_s or 0.0) > span.end_s
        }
    return tuple(unit.name for unit in rank.units if unit.name in found)
