"""Which units' forwards run again together in the backward, and what each such run keeps."""

from __future__ import annotations

from collections.abc import Iterable

from memadvisor.stretches import Stretch


class Stretches:
    """Stretches of units that are run again before the backward of their last unit; they nest.

    What a stretch runs again keeps all, but for units of an inner stretch, of which again only the input is kept.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        """`stretches`: names of the units of each, in order of execution."""
        self._all = tuple(sorted(set(stretches), key=len, reverse=True))
        self._around: dict[str, list[Stretch]] = {}
        self._ending: dict[str, list[Stretch]] = {}
        for stretch in self._all:
            self._ending.setdefault(stretch[-1], []).append(stretch)
            for unit in stretch:
                self._around.setdefault(unit, []).append(stretch)

    @classmethod
    def alone(cls, units: Iterable[str]) -> Stretches:
        """Each of these units by itself."""
        return cls((unit,) for unit in units)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stretches) and set(self._all) == set(other._all)

    def __hash__(self) -> int:
        return hash(frozenset(self._all))

    def __contains__(self, unit: str | None) -> bool:
        return unit in self._around

    @property
    def units(self) -> Iterable[str]:
        """All units that are run again."""
        return self._around.keys()

    @property
    def are_alone(self) -> bool:
        """Whether each unit that is run again is so by itself, and once."""
        return all(len(stretch) == 1 for stretch in self._all)

    def around(self, unit: str) -> list[Stretch]:
        """Those that hold a unit, outer ones first."""
        return self._around.get(unit, [])

    def ending(self, unit: str) -> list[Stretch]:
        """Those that are run again before this unit's backward, in order."""
        return self._ending.get(unit, [])

    def body(self, stretch: Stretch) -> list[Stretch]:
        """What a stretch runs again, in order: inner stretches, and units that keep all as stretches of one."""
        items: list[Stretch] = []
        for unit in stretch:
            inner = [s for s in self._around[unit] if len(s) < len(stretch)]
            item = inner[0] if inner else (unit,)
            if not items or items[-1] != item:
                items.append(item)
        return items

    def keeps_all(self, item: Stretch, stretch: Stretch) -> bool:
        """Whether an item of a stretch's body is a unit that keeps all in that run."""
        return len(item) == 1 and self._around[item[0]][-1] == stretch

    def runs(self, stretch: Stretch) -> list[Stretch]:
        """The items of its body that run when it is run again: an inner stretch at its end runs later, by itself."""
        items = self.body(stretch)
        return items if self.keeps_all(items[-1], stretch) else items[:-1]
