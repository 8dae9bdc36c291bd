"""Units that are called several times, some of whose calls run again while others keep what they do.

Who asks what runs again asks for units by name. So the calls that keep what they do are shown to it as those of another
unit, of which no plan says anything: nothing of them is freed, and what they save and take is needed as long as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from memadvisor.cost.saved import CallUses, UnitCall
from memadvisor.cost.step import BoundaryTensor, CapturedStep, Inner, Segment

KeptCalls = Mapping[str, tuple[int, ...]]  # by unit, numbers of its calls in a micro-batch

_OTHER = "\0"  # in no name of a module


def with_calls_apart(step: CapturedStep, kept: KeptCalls) -> CapturedStep:
    """The same step, in which kept calls are of other units."""
    if not kept:
        return step
    segments = tuple(_apart(each, kept) for each in step.segments)
    return replace(
        step,
        segments=segments,
        inner=tuple(_inner(each, segments) for each in step.inner),
        cached=tuple(_inner(each, segments) for each in step.cached),
        boundaries=tuple(_boundary(each, kept, segments) for each in step.boundaries),
    )


def keepable_calls(step: CapturedStep) -> dict[str, int]:
    """By unit, how many calls it has in each micro-batch, where an engine that counts calls since the last backward counts
    them as the step does."""
    found: dict[str, dict[int | None, int]] = {}
    strange: set[str] = {each.unit for each in step.segments if each.walk and each.unit is not None}
    count: dict[str, int] = {}
    before: Segment | None = None
    for segment in step.segments:
        if segment.phase == "backward":
            count = {}
        elif segment.phase == "forward" and segment.unit is not None:
            is_begun = (before is not None) and (before.phase, before.unit, before.pass_number) == (
                segment.phase,
                segment.unit,
                segment.pass_number,
            )
            if not is_begun:
                if count.get(segment.unit, 0) != segment.call:
                    strange.add(segment.unit)
                count[segment.unit] = segment.call + 1
                found.setdefault(segment.unit, {})[segment.micro_batch] = segment.call + 1
        before = segment
    calls = {unit: set(numbers.values()) for unit, numbers in found.items()}
    return {
        unit: min(numbers)
        for unit, numbers in calls.items()
        if len(numbers) == 1 and min(numbers) > 1 and unit not in strange
    }


def _apart(segment: Segment, kept: KeptCalls) -> Segment:
    if segment.unit is None or segment.call not in kept.get(segment.unit, ()):
        return segment
    return replace(segment, unit=segment.unit + _OTHER)


def _inner(item: Inner, segments: tuple[Segment, ...]) -> Inner:
    unit = segments[item.birth_segment].unit
    return replace(item, unit=unit) if unit == item.unit + _OTHER else item


def _boundary(tensor: BoundaryTensor, kept: KeptCalls, segments: tuple[Segment, ...]) -> BoundaryTensor:
    casts = tuple(
        (unit + _OTHER if segments[backward].call in kept.get(unit, ()) else unit, backward, until)
        for unit, backward, until in tensor.cast_again
    )
    if tensor.by_call is None:
        return replace(tensor, cast_again=casts) if casts != tensor.cast_again else tensor
    uses: CallUses = tensor.by_call
    return replace(
        tensor,
        saved_until=_last(uses.saved_until, kept),
        input_of=_last(uses.input_of, kept),
        saved_by_takers=frozenset(_last(dict.fromkeys(uses.saved_by_takers, 0), kept)),
        cast_again=casts,
    )


def _last(until: Mapping[UnitCall, int], kept: Mapping[str, Collection[int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (unit, call), segment in until.items():
        name = unit + _OTHER if call in kept.get(unit, ()) else unit
        found[name] = max(segment, found.get(name, segment))
    return found
