"""Which forward of a stage each backward belongs to, in a pipeline, where several micro-batches are under way at once.

The recorder counts micro-batches by backwards, since a script without a pipeline has one under way. Every schedule of
`torch.distributed.pipelining` takes the micro-batches of a stage in order, forwards and backwards alike, so the n-th
backward of a stage is that of its n-th forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from memadvisor.run.cut import innermost
from memadvisor.run.records import Span
from memadvisor.run.run import RankRun


def with_passes_apart(rank: RankRun) -> RankRun:
    """The same with a number of its own, in place of a micro-batch's, for each pass of a micro-batch through a stage:
    stage k of those of this rank has the numbers from k times the number of micro-batches on."""
    return _renumbered(rank, lambda place, count, most: place * most + count)


def with_micro_batches_apart(rank: RankRun) -> RankRun:
    """The same with micro-batches as the script's schedule counts them, through whatever stage."""
    return _renumbered(rank, lambda place, count, most: count)


def _renumbered(rank: RankRun, number_of: Callable[[int, int, int], int]) -> RankRun:
    models = {stage.model: place for place, stage in enumerate(rank.pipeline_stages)}
    most = max(stage.num_micro_batches for stage in rank.pipeline_stages)
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in rank.spans:
        by_step[span.step].append(span)
    spans, saved = [], rank.saved
    for index, own in by_step.items():
        passes = _passes(own, models, lambda place, count: number_of(place, count, most))
        spans += [replace(span, micro_batch=passes.number_at(span.start_s, span.micro_batch)) for span in own]
        if rank.traced_step is not None and rank.traced_step.index == index:
            saved = tuple(
                replace(row, micro_batch=passes.number_at(row.saved_s, row.micro_batch)) for row in saved
            )
    return replace(rank, spans=tuple(spans), saved=saved)


@dataclass(frozen=True, slots=True)
class _Passes:
    """Forwards and backwards of one step in order, and their numbers."""

    spans: Sequence[Span]
    starts: Sequence[float]
    numbers: Sequence[int]

    def number_at(self, time_s: float, otherwise: int) -> int:
        """Of the pass that goes on at a time, or ends at it."""
        at = bisect_right(self.starts, time_s) - 1
        return self.numbers[at] if at >= 0 and time_s <= self.spans[at].end_s else otherwise


def _passes(
    spans: Sequence[Span], models: Mapping[str, int], number_of: Callable[[int, int], int]
) -> _Passes:
    found = sorted(
        (span for span in spans if span.kind in ("forward", "backward")), key=lambda span: span.start_s
    )
    numbers: list[int] = []
    counts: Counter[tuple[str, int]] = Counter()
    for span in found:
        place = models.get(_model_of(span, spans, models) or "", 0)
        numbers.append(number_of(place, counts[span.kind, place]))
        counts[span.kind, place] += 1
    return _Passes(found, [span.start_s for span in found], numbers)


def _model_of(span: Span, spans: Sequence[Span], models: Mapping[str, int]) -> str | None:
    """A backward tells by the units that it goes through."""
    if len(models) == 1:
        return next(iter(models))
    if span.kind == "forward":
        return innermost(span.unit, models)
    inside = (
        each.unit
        for each in spans
        if each.kind == "unit_backward" and span.start_s <= each.start_s <= span.end_s
    )
    return next((innermost(unit, models) for unit in inside), None)
