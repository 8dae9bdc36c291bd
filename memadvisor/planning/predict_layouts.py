"""Cases of a table, or of the command line, -> predictions; what a case leaves open is settled here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from memadvisor.cost.layouts.estimate import StepEstimate, estimate_step
from memadvisor.errors import MemadvisorError
from memadvisor.layout import TrainingStep
from memadvisor.layout_table.read import LayoutCase, LayoutRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPrediction:
    """`step` is the one that `estimate` is of: with the micro-batch size that was chosen where the case leaves it open."""

    step: TrainingStep
    estimate: StepEstimate


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """One row of a table: its prediction, or why it has none."""

    prediction: LayoutPrediction | None
    error: str | None
    notes: tuple[str, ...]


def predict_case(case: LayoutCase, *, timeline: bool = False) -> LayoutPrediction:
    """Raises UsageError for an impossible layout. `timeline`: with every piece of the pipeline's work.

    An open micro-batch size is the fastest of 1, 2, 4, ... that divides a replica's sequences and fits; 1 where none fits.
    """
    step = _fastest(case).step if case.micro_batch_is_open else case.step
    return LayoutPrediction(
        step=step, estimate=estimate_step(case.architecture, step, case.cluster, timeline=timeline)
    )


def _fastest(case: LayoutCase) -> LayoutPrediction:
    """Of the micro-batch sizes that fit."""
    steps = [_with_micro_batch(case.step, size) for size in _divisors(case.step.layout.num_microbatches)]
    tried: list[LayoutPrediction] = []
    for step in steps:
        try:
            estimate = estimate_step(case.architecture, step, case.cluster)
        except MemadvisorError:
            if tried:  # a larger micro-batch may leave too few of them for the schedule
                break
            raise
        tried.append(LayoutPrediction(step=step, estimate=estimate))
        if not estimate.fits:
            break
    fitting = [each for each in tried if each.estimate.fits]
    return min(fitting or tried[:1], key=lambda each: each.estimate.step_time_s)


def predict_row(row: LayoutRow) -> RowPrediction:
    """The prediction of a row; its error instead where it, or what it describes, makes no sense."""
    if row.case is None:
        return RowPrediction(prediction=None, error=row.error, notes=row.notes)
    try:
        prediction = predict_case(row.case)
    except MemadvisorError as error:
        return RowPrediction(prediction=None, error=error.one_line(), notes=row.notes)
    except (ArithmeticError, ValueError) as error:
        # Shapes that no one trains may leave the formulas' range; one such row must not cost the others their numbers.
        return RowPrediction(prediction=None, error=f"no prediction comes out: {error}.", notes=row.notes)
    notes = row.notes
    if row.case.micro_batch_is_open:
        size = prediction.step.layout.micro_batch_size
        notes = (*notes, f"no micro_batch_size: the fastest that fits, {size}, is taken")
    return RowPrediction(prediction=prediction, error=None, notes=notes)


def _with_micro_batch(step: TrainingStep, size: int) -> TrainingStep:
    count = step.layout.num_microbatches // size
    return dataclasses.replace(
        step, layout=dataclasses.replace(step.layout, micro_batch_size=size, num_microbatches=count)
    )


def _divisors(sequences: int) -> list[int]:
    return [2**power for power in range(11) if sequences % 2**power == 0]
