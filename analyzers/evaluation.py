"""What of the timed steps a model's calls without gradients took, and in how many steps nobody could see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.analyzers.intervals import holds, union
from memadvisor.run.records import Span
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Calls of models without gradients in the finished timed steps, warm-up included.

    Their time is part of the step around them, under `outside`. Of `num_unseen_steps` no call of a model is recorded
    (nobody listened to the modules, to save time, or the run had reached its size): the other figures leave them out.
    """

    num_calls: int
    num_steps: int  # that hold such a call
    time_s: float  # of all these calls
    num_unseen_steps: int


def evaluation(rank: RankRun) -> Evaluation | None:
    """None where no call of a model was seen in any timed step: it may have been compiled with its caller."""
    timed = {step.index for step in rank.steps if not step.traced}
    seen = {span.step for span in rank.spans if span.kind in ("forward", "evaluation")} & timed
    if not seen:
        return None
    calls = [span for span in rank.spans if span.kind == "evaluation" and span.step in timed]
    return Evaluation(
        num_calls=len(calls),
        num_steps=len({span.step for span in calls}),
        time_s=sum(span.end_s - span.start_s for span in calls),
        num_unseen_steps=len(timed - seen),
    )


def without_evaluated_units(spans: Sequence[Span]) -> list[Span]:
    """All spans but those of units inside an evaluation, which are no part of a training's forward."""
    evaluations = union((span.start_s, span.end_s) for span in spans if span.kind == "evaluation")
    return [s for s in spans if not (s.kind.startswith("unit_") and holds(evaluations, s.start_s))]
