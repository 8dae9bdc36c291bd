"""Backwards of units that begin at once with that of the unit that they are inside of: they return one tensor.

A recorder hears of the inner one first, and then of the outer one, in whose name everything ran that is the inner one's
work. Here the outer one's is over at once, and the inner one's goes on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from memadvisor.run.cut import innermost
from memadvisor.run.records import Span
from memadvisor.run.run import RankRun

_Pair = tuple[str, str]  # an inner unit and one around it


def with_nested_backwards(rank: RankRun) -> RankRun:
    """The same rank with spans of such backwards in their order, in all steps; as it is where there are none."""
    pairs = _at_once(rank)
    if not pairs:
        return rank
    others = [span for span in rank.spans if span.kind != "unit_backward"]
    changed = [
        replace(span, unit=other.unit)
        for run in _runs(rank.spans, pairs)
        for span, other in zip(run, reversed(run), strict=True)
    ]
    return replace(rank, spans=tuple(sorted((*others, *changed), key=lambda span: (span.step, span.start_s))))


def _at_once(rank: RankRun) -> frozenset[_Pair]:
    """Units between whose beginnings nothing ran in the traced step."""
    step = rank.traced_step
    starts = sorted(operator.start_s for operator in rank.operators)
    if step is None or not starts:
        return frozenset()
    own = [span for span in rank.spans if span.step == step.index]
    return frozenset(
        (inner.unit, outer.unit)
        for inner, outer in pairwise(_backwards(own))
        if inner.unit != outer.unit
        and _is_followed(inner, outer)
        and innermost(inner.unit, (outer.unit,)) is not None
        and bisect_left(starts, inner.start_s) == bisect_left(starts, inner.end_s)
    )


def _runs(spans: Sequence[Span], pairs: Collection[_Pair]) -> Iterator[list[Span]]:
    """All backwards of units, those that begin at once together."""
    run: list[Span] = []
    for span in _backwards(spans):
        if run and not ((run[-1].unit, span.unit) in pairs and _is_followed(run[-1], span)):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _backwards(spans: Sequence[Span]) -> list[Span]:
    found = (span for span in spans if span.kind == "unit_backward")
    return sorted(found, key=lambda span: (span.step, span.start_s, span.end_s))


def _is_followed(inner: Span, outer: Span) -> bool:
    same = (inner.step, inner.micro_batch) == (outer.step, outer.micro_batch)
    return same and inner.end_s == outer.start_s
