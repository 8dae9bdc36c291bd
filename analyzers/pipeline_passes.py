"""Which forward of a stage each backward belongs to, in a pipeline, where several micro-batches are under way at once.

The recorder counts micro-batches by backwards, since a script without a pipeline has one under way. Every schedule of
`torch.distributed.pipelining` takes the micro-batches of a stage in order, forwards and backwards alike, so the n-th
backward of a stage is that of its n-th forward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from memadvisor.run.cut import innermost
from memadvisor.run.records import Span
from memadvisor.run.run import RankRun


def with_passes_apart(rank: RankRun) -> RankRun:
    """The same with a number of its own, in place of a micro-batch's, for each pass of a micro-batch through a stage:
    stage k of those of this rank has the numbers from k times the number of micro-batches on."""
    models = {stage.model: place for place, stage in enumerate(rank.pipeline_stages)}
    most = max(stage.num_micro_batches for stage in rank.pipeline_stages)
    by_step: dict[int, list[Span]] = defaultdict(list)
    for span in rank.spans:
        by_step[span.step].append(span)
    spans = [span for own in by_step.values() for span in _numbered(own, models, most)]
    return replace(rank, spans=tuple(spans))


def pass_of(number: int, num_micro_batches: int) -> tuple[int, int]:
    """The place of the stage among those of its rank, and the micro-batch, of a number of `with_passes_apart`."""
    return divmod(number, num_micro_batches)


def _numbered(spans: Sequence[Span], models: Mapping[str, int], most: int) -> Iterator[Span]:
    """Spans of one step."""
    passes = sorted(
        (span for span in spans if span.kind in ("forward", "backward")), key=lambda span: span.start_s
    )
    starts = [span.start_s for span in passes]
    numbers: list[int] = []
    counts: Counter[tuple[str, int]] = Counter()
    for span in passes:
        place = models.get(_model_of(span, spans, models) or "", 0)
        numbers.append(place * most + counts[span.kind, place])
        counts[span.kind, place] += 1
    for span in spans:
        at = bisect_right(starts, span.start_s) - 1
        inside = at >= 0 and span.start_s <= passes[at].end_s
        yield replace(span, micro_batch=numbers[at]) if inside else span


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
