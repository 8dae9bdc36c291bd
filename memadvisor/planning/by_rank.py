"""What plans with choices by rank have in common, be the ranks stages of a pipeline or parts of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from memadvisor.analyzers.planned_models import fingerprint_of, planned_models
from memadvisor.plan import Plan, Prediction, RankPlan
from memadvisor.planning.stage_choice import Chosen, StageChoice
from memadvisor.run.run import Run


class _Point(Protocol):
    @property
    def peak_bytes(self) -> int: ...
    @property
    def step_time_s(self) -> float: ...


_AnyPoint = TypeVar("_AnyPoint", bound=_Point)


def rank_plans(
    run: Run, ranks: Sequence[StageChoice], choices: Sequence[Chosen], step_time_s: float
) -> tuple[RankPlan, ...]:
    """What each rank does, with its own peak, and the step of all."""
    return tuple(
        RankPlan(
            rank=recorded.process.rank,
            fingerprint=fingerprint_of(recorded),
            units=rank.units_of(own),
            models=planned_models(recorded, 1),
            prediction=_prediction(rank, own, step_time_s),
        )
        for recorded, rank, own in zip(run.ranks, ranks, choices, strict=True)
    )


def plan_of_ranks(ranks: tuple[RankPlan, ...], budget_bytes: int, why: str, *, alike: bool = False) -> Plan:
    """Predicted as the fullest rank."""
    predictions = [each.prediction for each in ranks if each.prediction is not None]
    return Plan(
        num_ranks=len(ranks),
        zero_stage=0,
        policy="chosen",
        ranks=ranks,
        ranks_alike=alike,
        prediction=max(predictions, key=lambda prediction: prediction.peak_bytes),
        budget_bytes=budget_bytes,
        why=why,
    )


def _prediction(rank: StageChoice, own: Chosen, step_time_s: float) -> Prediction:
    """Of the rank's peak, and of the step of all: parts of that are not told apart, as ranks wait for each other."""
    alone = rank.play(own).prediction()
    return replace(
        alone, step_time_s=step_time_s, components_s=None, exposed_transfer_s=None, sent_bytes=None
    )


def front_of_points(points: Iterable[_AnyPoint]) -> tuple[_AnyPoint, ...]:
    """Those than which none takes both less memory and less time, least memory first."""
    front: list[_AnyPoint] = []
    for point in sorted(points, key=lambda each: (each.peak_bytes, each.step_time_s)):
        if not front or point.step_time_s < front[-1].step_time_s * (1 - 1e-9):
            front.append(point)
    return tuple(front)
