"""What an optimizer's step allocates beside its state for some units alone, of where an engine has it update units one after
another: what it had for their parameters in the captured step, in the same order.

Of all together (foreach), a group of parameters after another is updated: the highest instant is that of one group, and a
unit's share of it is not the unit's share of all parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateChanges:
    """Of one of the step's optimizer segments.

    own: signed bytes of what is for a unit's parameters, by unit, each with its place among all of them. anyones: of what
    every update has, such as constants. untold: of what is for some parameter or other. highest_bytes: the most that is
    there of all.
    """

    own: Mapping[str, tuple[tuple[int, int], ...]]
    anyones: tuple[tuple[int, int], ...]
    untold: tuple[tuple[int, int], ...]
    highest_bytes: int


@dataclass(frozen=True, slots=True)
class OwnUpdates:
    """Those of a step, by position of the segment."""

    changes: Mapping[int, UpdateChanges] = field(default_factory=dict)
    _found: dict[tuple[int, frozenset[str]], Fraction] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def share(self, names: Collection[str], position: int | None, otherwise: float) -> Fraction | None:
        """What is there at most while only these units are updated, of what is there while all are; `otherwise`: of what no
        unit tells. Without a position, where it is largest; None where nothing is allocated."""
        if position is None:
            found = [self.share(names, each, otherwise) for each in self.changes]
            return max((each for each in found if each is not None), default=None)
        changes = self.changes.get(position)
        if changes is None or not changes.highest_bytes:
            return None
        key = position, frozenset(names)
        if key not in self._found:
            self._found[key] = Fraction(_highest_bytes(changes, names, otherwise), changes.highest_bytes)
        return self._found[key]


def _highest_bytes(changes: UpdateChanges, names: Iterable[str], otherwise: float) -> int:
    played = [(place, delta) for name in names for place, delta in changes.own.get(name, ())]
    untold = [(place, round(delta * otherwise)) for place, delta in changes.untold]
    level = highest = 0
    for _, delta in sorted([*played, *changes.anyones, *untold]):
        level += delta
        highest = max(highest, level)
    return highest
