"""What parts of units, chosen for one captured step, change of its memory and its time (parts.py has the law)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memadvisor.cost.activation_changes import SegmentChange
from memadvisor.cost.parts import Bytes, Modules, PartedPass
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.stretches import Stretches


class PartedUnits:
    """Of one step, the units that a choice gives parts."""

    def __init__(
        self, step: CapturedStep, parts: Mapping[str, tuple[Modules, ...]], stretches: Stretches
    ) -> None:
        self._step = step
        self._stretches = stretches
        self._passes: dict[tuple[str, int | None], PartedPass] = {}
        self._at: dict[int, PartedPass] = {}
        for (unit, number), found in chosen_passes(step, parts).items():
            self._passes[unit, number] = found
            self._at[found.backward] = found
            if unit not in stretches:
                self._at[found.forward] = found

    def __contains__(self, position: int) -> bool:
        return position in self._at

    def holding(self) -> frozenset[str]:
        """Units with a part that holds what they are called with until it runs again."""
        return units_holding(self._passes.values())

    def changes(self) -> Iterable[SegmentChange]:
        for (unit, _), found in self._passes.items():
            if unit not in self._stretches:
                first, last = found.forward + 1, found.backward
                yield SegmentChange("temporary", first, last, found.put_back_bytes, ends_inside=True)
                for storage in (storage for part in found.parts for storage in part.storages):
                    first, last = storage.unsaved[0] + 1, min(storage.death_segment, found.backward)
                    yield SegmentChange(storage.category, first, last, -storage.size_bytes, ends_inside=True)

    def peak(self, position: int, view: str, start: Bytes) -> dict[str, int]:
        """Of a segment with parts, from its captured start."""
        found = self._at[position]
        timeline = self._step.timelines[position]
        if position == found.forward:
            return found.forward_peak(start, timeline.views[view])
        return found.backward_peak(start, timeline.views[view])

    def growth(self, unit: str, number: int | None) -> dict[str, int] | None:
        """Of the unit's second run; None for a unit without parts."""
        found = self._passes.get((unit, number))
        return None if found is None else found.growth()

    def seconds(self, position: int) -> float:
        """What the parts' runs take in a backward."""
        found = self._at.get(position)
        if found is None or position != found.backward:
            return 0.0
        return sum(part.run.seconds(self._step.second_run_cost) for part in found.parts)


def units_holding(passes: Iterable[PartedPass]) -> frozenset[str]:
    return frozenset(each.unit for each in passes if any(part.holds_input for part in each.parts))


def chosen_passes(
    step: CapturedStep, parts: Mapping[str, tuple[Modules, ...]]
) -> dict[tuple[str, int | None], PartedPass]:
    """By unit and pass, with these parts of units."""
    options = step.parted.items() if parts else ()
    found = ((key, each.with_modules(parts.get(key[0]))) for key, each in options)
    return {key: one for key, one in found if one is not None}
