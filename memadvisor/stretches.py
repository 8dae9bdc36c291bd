"""Stretches of a plan: runs of units that are recomputed together, named by the first unit and the last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from memadvisor.errors import PlanError

Stretch = tuple[str, ...]  # names of all its units, in order of execution


def units_of_stretches(pairs: Collection[tuple[str, str]], names: Sequence[str]) -> tuple[Stretch, ...]:
    """All units of each stretch, outer ones first. `names`: all units of the plan, in order of execution."""
    if not pairs:
        return ()
    place = {name: position for position, name in enumerate(names)}
    found = [tuple(names[place[first] : place[last] + 1]) for first, last in pairs]
    return tuple(sorted(found, key=len, reverse=True))


def check_stretches(pairs: Collection[tuple[str, str]], gathered: Mapping[str, bool], source: str) -> None:
    """Raise PlanError where one is not of two units and more in their order, where two cross, or where one has
    units whose parameters are gathered one by one. `gathered`: whether they are, for all units in their order."""
    names = list(gathered)
    place = {name: position for position, name in enumerate(names)}
    spans = []
    for first, last in pairs:
        if first not in place or last not in place or place[first] >= place[last]:
            raise PlanError(
                f"{source} has a stretch from {first!r} to {last!r}.",
                hint="name two of the plan's units, the one that runs first before the other.",
            )
        spans.append((place[first], place[last]))
        if any(gathered[name] for name in names[place[first] : place[last] + 1]):
            raise PlanError(
                f"{source} has a stretch of units of ZeRO stage 3, from {first!r} to {last!r}.",
                hint="such units are gathered one by one; recompute each by itself.",
            )
    for begin, end in spans:
        crosses = any(a < begin <= b < end for a, b in spans)
        if crosses or spans.count((begin, end)) > 1:
            raise PlanError(
                f"{source} has stretches that overlap at {names[begin]!r}.",
                hint="of two stretches that share units, one must lie within the other.",
            )


def stretches_text(stretches: Collection[Stretch]) -> str:
    """How many there are, in words."""
    num_inner = sum(any(set(one) < set(other) for other in stretches) for one in stretches)
    inner = f", {num_inner} of them inside others" if num_inner else ""
    return f"{len(stretches)} stretch{'es' * (len(stretches) > 1)} of units run again as one{inner}"
