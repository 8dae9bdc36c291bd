"""Units whose modules another unit's forward calls: a norm of the model that all its blocks are handed.

Such a call is a part of the caller's: it cuts its forward and its backward, and runs again with it. What is the unit's own
of it, its parameters, lent_modules.py tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from memadvisor.run.cut import innermost
from memadvisor.run.records import Span
from memadvisor.run.run import RankRun

_FORWARDS = ("unit_forward", "unit_recompute")


def with_lent_calls_inside(rank: RankRun) -> RankRun:
    """The same with what a unit runs inside of another's forward, and their backwards, being that other's.

    A unit is left as it was in a micro-batch in which not every call has a backward that begins inside of its caller's:
    where several losses go through it, or what it gave was not needed.
    """
    spans = list(rank.spans)
    models = {unit.name: unit.model for unit in rank.units}
    by_batch: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        if span.kind.startswith("unit_"):
            by_batch[span.step, span.micro_batch].append(place)
    dropped: set[int] = set()
    for places in by_batch.values():
        ordered = sorted(places, key=lambda place: (spans[place].start_s, -spans[place].end_s))
        callers = _callers(spans, ordered, models)
        if callers:
            dropped |= _merge(spans, places, callers)
    if not dropped:
        return rank
    return replace(rank, spans=tuple(span for place, span in enumerate(spans) if place not in dropped))


def _callers(
    spans: Sequence[Span], ordered: Sequence[int], models: Mapping[str, str | None]
) -> dict[int, int]:
    """By forward that runs inside of another unit's, which does not hold it, that other's: the outermost of them."""
    found: dict[int, int] = {}
    around: list[int] = []
    for place in ordered:
        span = spans[place]
        if span.kind not in _FORWARDS:
            continue
        around = [
            each for each in around if spans[each].end_s >= span.end_s and spans[each].kind == span.kind
        ]
        inside = around[-1] if around else None
        if inside is not None and inside in found:
            found[place] = found[inside]
        elif inside is not None and not _holds(spans[inside].unit, span.unit, models):
            found[place] = inside
        around.append(place)
    return found


def _holds(unit: str, inner: str, models: Mapping[str, str | None]) -> bool:
    """The first of several models has no name, as if it held all others."""
    return innermost(inner, (unit,)) is not None and models.get(unit) == models.get(inner)


def _merge(spans: list[Span], places: Sequence[int], callers: dict[int, int]) -> set[int]:
    """Have callers' backwards last as long as those of what they call; which spans are theirs now."""
    backwards = sorted(
        (p for p in places if spans[p].kind == "unit_backward"), key=lambda p: spans[p].start_s
    )
    lent = {spans[place].unit for place in callers}
    while lent and (found := _lent_backwards(spans, places, backwards, callers, lent)) is None:
        pass
    if not lent or found is None:
        return set()
    for place, into in found.items():
        end_s = max(spans[into].end_s, spans[place].end_s)
        spans[into] = replace(spans[into], end_s=end_s)
    return {place for place in callers if spans[place].unit in lent} | set(found)


def _lent_backwards(
    spans: Sequence[Span],
    places: Sequence[int],
    backwards: Sequence[int],
    callers: dict[int, int],
    lent: set[str],
) -> dict[int, int] | None:
    """By backward of a call of `lent` units inside another unit, that other's backward; takes units out of `lent` of which
    that cannot be told, and is then None."""
    caller_of: dict[int, str] = {}
    for unit in sorted(lent):
        forwards = _forwards_of(spans, places, unit)
        own = [place for place in backwards if spans[place].unit == unit]
        if len(own) != len(forwards):
            lent.discard(unit)
            return None
        for forward, backward in zip(forwards, reversed(own), strict=True):
            if forward in callers:
                caller_of[backward] = spans[callers[forward]].unit
    into: dict[int, int] = {}
    last: int | None = None
    for place in backwards:
        if place not in caller_of:
            last = place
        elif last is None or spans[last].unit != caller_of[place]:
            lent.discard(spans[place].unit)
            return None
        else:
            into[place] = last
    return into


def _forwards_of(spans: Sequence[Span], places: Collection[int], unit: str) -> list[int]:
    own = [p for p in places if spans[p].kind == "unit_forward" and spans[p].unit == unit]
    return sorted(own, key=lambda place: spans[place].start_s)
