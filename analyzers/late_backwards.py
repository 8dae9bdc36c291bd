"""Models whose backward comes behind another one's: a generator, whose images the judge is trained with first.

The recorder counts micro-batches by backwards, so that such a model's forward is in the one and its backward in another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from memadvisor.run.records import Span
from memadvisor.run.run import RankRun


def with_forwards_of_their_backwards(rank: RankRun) -> RankRun:
    """The same with the calls of a model that the micro-batch of its next backward has, in that one: where no unit of it
    goes backward before, nor forward again. Those micro-batches are then under way at once."""
    of_step: dict[int, list[Span]] = defaultdict(list)
    for span in rank.spans:
        of_step[span.step].append(span)
    spans, saved = [], rank.saved
    for index, own in of_step.items():
        late = [*_late_calls(own)]
        spans += [replace(span, micro_batch=_number(late, span.start_s, span.micro_batch)) for span in own]
        if rank.traced_step is not None and rank.traced_step.index == index:
            saved = tuple(
                replace(row, micro_batch=_number(late, row.saved_s, row.micro_batch)) for row in saved
            )
    return replace(rank, spans=tuple(spans), saved=saved)


@dataclass(frozen=True, slots=True)
class _LateCall:
    start_s: float
    end_s: float
    micro_batch: int  # of its backward


def _late_calls(spans: Sequence[Span]) -> Iterator[_LateCall]:
    """The calls of models in a step whose backward comes in a later micro-batch."""
    forwards, backwards = _numbers(spans, "unit_forward"), _numbers(spans, "unit_backward")
    units = sorted((s for s in spans if s.kind == "unit_forward"), key=lambda span: span.start_s)
    for call in spans:
        if call.kind != "forward":
            continue
        inside = {s.unit for s in units if call.start_s <= s.start_s and s.end_s <= call.end_s}
        forward = set().union(*(forwards[unit] for unit in inside))
        backward = set().union(*(backwards[unit] for unit in inside))
        later = min((number for number in backward if number >= call.micro_batch), default=None)
        if later is None or later == call.micro_batch:
            continue
        if not any(call.micro_batch < number <= later for number in forward):
            yield _LateCall(call.start_s, call.end_s, later)


def _numbers(spans: Sequence[Span], kind: str) -> dict[str, set[int]]:
    """By unit, in which micro-batches it has spans of this kind."""
    found: dict[str, set[int]] = defaultdict(set)
    for span in spans:
        if span.kind == kind:
            found[span.unit].add(span.micro_batch)
    return found


def _number(late: Sequence[_LateCall], time_s: float, otherwise: int) -> int:
    return next((call.micro_batch for call in late if call.start_s <= time_s <= call.end_s), otherwise)
