"""Losses that are made of a derivative: what a step's backwards have made themselves, for a later one to go through; and
several losses of one graph, each gone through by itself.

`torch.autograd.grad(energy, positions, create_graph=True)`: forces, gradient penalties, equations that a network solves.
`loss.backward(retain_graph=True)`: losses of several tasks. What units' forwards keep is asked for by that backward, and once
more by the last one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from memadvisor.run.records import Saved, Span
from memadvisor.run.run import RankRun


def differentiated_backwards(rank: RankRun) -> tuple[Span, ...]:
    """The backwards of the traced step in which autograd has kept what a later one lets go of, in order.

    What a checkpoint's second forward keeps is for the backward that it is run in.
    """
    step = rank.traced_step
    if step is None:
        return ()
    backwards = _backwards([span for span in rank.spans if span.step == step.index])
    again = [call for call in rank.module_calls if call.phase == "recompute"]
    saved = sorted(rank.saved, key=_saved_s)
    return tuple(
        span
        for span, following in pairwise(backwards)
        if any(
            not any(call.start_s <= row.saved_s <= call.end_s for call in again)
            for row in saved[
                bisect_left(saved, span.start_s, key=_saved_s) : bisect_right(saved, span.end_s, key=_saved_s)
            ]
            if (row.released_s or 0.0) >= following.start_s
        )
    )


def repeated_backwards(rank: RankRun) -> tuple[Span, ...]:
    """The backwards of the traced step that let go of nothing which forwards have kept, and after which another one goes
    through some of the same units, with no forward between, and does let go of that."""
    step = rank.traced_step
    if step is None:
        return ()
    own = [span for span in rank.spans if span.step == step.index]
    forwards = sorted(span.start_s for span in own if span.kind == "forward")
    backwards = _backwards(own)
    found = []
    for place, span in enumerate(backwards[:-1]):
        kept = [row for row in rank.saved if row.saved_s < span.start_s]
        last = next((each for each in backwards[place:] if _released_in(kept, each)), span)
        if last is span or bisect_left(forwards, span.end_s) != bisect_left(forwards, last.start_s):
            continue
        both = _units_through(own, span) & _units_through(own, last)
        if not both.isdisjoint(_released_in(kept, last)):
            found.append(span)
    return tuple(found)


def _released_in(saved: Iterable[Saved], backward: Span) -> set[str]:
    """Units for which autograd lets go of any of these in this backward."""
    return {row.unit for row in saved if backward.start_s <= (row.released_s or 0.0) <= backward.end_s}


def _units_through(spans: Sequence[Span], backward: Span) -> set[str]:
    """Whose backward runs in this one."""
    return {
        own.unit
        for own in spans
        if own.kind == "unit_backward" and backward.start_s <= own.start_s < backward.end_s
    }


def _saved_s(row: Saved) -> float:
    return row.saved_s


def with_derivatives_inside(rank: RankRun) -> RankRun:
    """The same with a derivative, what it is taken of and the backward of its loss in one micro-batch, and all backwards of
    one graph: the recorder counts micro-batches by backwards. Steps with another number of backwards than the traced one are
    left as they are.
    """
    starts = {span.start_s for span in (*differentiated_backwards(rank), *repeated_backwards(rank))}
    step = rank.traced_step
    if step is None or not starts:
        return rank
    of_step: dict[int, list[Span]] = defaultdict(list)
    for span in rank.spans:
        of_step[span.step].append(span)
    is_derivative = [span.start_s in starts for span in _backwards(of_step[step.index])]
    numbers = {index: _numbers(_backwards(spans), is_derivative) for index, spans in of_step.items()}
    own = numbers[step.index]
    return replace(
        rank,
        spans=tuple(
            replace(span, micro_batch=numbers[span.step].get(span.micro_batch, span.micro_batch))
            for span in rank.spans
        ),
        saved=tuple(
            replace(row, micro_batch=own.get(row.micro_batch, row.micro_batch)) for row in rank.saved
        ),
    )


def copies_released_s(rank: RankRun) -> tuple[float, ...]:
    """When the graph of a derivative lets go of what forwards kept: were these run again, of copies that it holds alone."""
    kept: dict[int, float] = {}  # by storage, when it was first saved
    for row in rank.saved:
        kept[row.storage_id] = min(row.saved_s, kept.get(row.storage_id, row.saved_s))
    derivatives = differentiated_backwards(rank)
    return tuple(
        row.released_s
        for span in derivatives
        for row in rank.saved
        if span.start_s <= row.saved_s <= span.end_s
        and kept[row.storage_id] < span.start_s
        and row.released_s is not None
        and row.released_s > span.end_s
    )


def _backwards(spans: Sequence[Span]) -> list[Span]:
    return sorted((span for span in spans if span.kind == "backward"), key=lambda span: span.start_s)


def _numbers(backwards: Sequence[Span], is_derivative: Sequence[bool]) -> Mapping[int, int]:
    """By number of a micro-batch as it was counted, that of the first of those that it is one with."""
    if len(backwards) != len(is_derivative):
        return {}
    numbers: dict[int, int] = {}
    first: int | None = None
    for span, goes_on in zip(backwards, is_derivative, strict=True):
        first = span.micro_batch if first is None else first
        numbers[span.micro_batch] = first
        first = first if goes_on else None
    return numbers


def units_differentiated(rank: RankRun) -> tuple[str, ...]:
    """Units whose backward runs in such a one, and that keep something that they have made before it until a later one, in
    the model's order."""
    return _units_kept_in(rank, differentiated_backwards(rank))


def units_repeated(rank: RankRun) -> tuple[str, ...]:
    """The same of backwards that another one of their graph follows."""
    return _units_kept_in(rank, repeated_backwards(rank))


def _units_kept_in(rank: RankRun, backwards: Iterable[Span]) -> tuple[str, ...]:
    made_by = {row.storage_id: row.unit for row in rank.storages if row.phase == "forward"}
    found: set[str] = set()
    for span in backwards:
        through = _units_through(rank.spans, span)
        found |= {
            row.unit
            for row in rank.saved
            if row.unit in through
            and made_by.get(row.storage_id) == row.unit
            and row.saved_s < span.start_s
            and (row.released_s or 0.0) > span.end_s
        }
    return tuple(unit.name for unit in rank.units if unit.name in found)
