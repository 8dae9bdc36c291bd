"""Bytes alive in a segment of a step, by category: when it begins, and at its highest instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Bytes = Mapping[str, int]  # by category


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Bytes alive in a segment, at its start and at its highest instant.

    `peak_unsaved`: the highest instant had this forward kept nothing for the backward but its inputs; of a unit's backward,
    the highest from when it first asks for what the unit has kept. It equals `peak` for all other segments.
    `until_asked`, of such a backward: what has come since its start, less what has gone, when it asks; `most_until_asked`:
    the most of that before it does.
    """

    start: Bytes
    peak: Bytes
    peak_unsaved: Bytes
    until_asked: Bytes = field(default_factory=dict)
    most_until_asked: Bytes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a `Level` has of all categories, by segment."""

    start: tuple[int, ...]
    peak: tuple[int, ...]
    peak_unsaved: tuple[int, ...]
