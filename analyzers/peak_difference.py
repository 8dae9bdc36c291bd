"""Whose bytes filled the peak before and after: by unit, and of each unit by category."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.peak import ModuleBytes, PeakBreakdown

ROOT = ""  # the model itself, as units name it


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakUnitChange:
    """What a unit held at the peaks of the traced steps; 0 of a unit that held nothing, or that a model does not have.

    `unit`: "" is the model itself, None what was born in no module. `by_category_bytes` sums to `size_bytes`, and all units
    with the unexplained to the peak.
    """

    unit: str | None
    size_bytes: Change[int]
    by_category_bytes: Mapping[str, Change[int]]


def peak_units(
    before: PeakBreakdown | None, after: PeakBreakdown | None
) -> tuple[PeakUnitChange, ...] | None:
    """All units that hold something in either, the largest difference first; None where either run recorded none."""
    if before is None or after is None:
        return None
    first, second = _by_unit(before), _by_unit(after)
    rows = [_change(unit, first.get(unit, {}), second.get(unit, {})) for unit in {**first, **second}]
    return tuple(sorted(rows, key=_order))


def _change(unit: str | None, before: Mapping[str, int], after: Mapping[str, int]) -> PeakUnitChange:
    return PeakUnitChange(
        unit=unit,
        size_bytes=Change(before=sum(before.values()), after=sum(after.values())),
        by_category_bytes={
            name: Change(before=before.get(name, 0), after=after.get(name, 0)) for name in {**before, **after}
        },
    )


def _order(row: PeakUnitChange) -> tuple[int, int]:
    return -abs(row.size_bytes.difference or 0), -max(row.size_bytes.before or 0, row.size_bytes.after or 0)


def _by_unit(peak: PeakBreakdown) -> dict[str | None, dict[str, int]]:
    found: dict[str | None, dict[str, int]] = {}
    for row in peak.by_module:
        of_root = peak.by_root_bytes.get(row.category, 0) if _names_nothing(row) else 0
        unit = None if _names_nothing(row) else _unit_of(row)
        for name, size_bytes in ((ROOT, of_root), (unit, row.size_bytes - of_root)):
            if size_bytes:
                sizes = found.setdefault(name, {})
                sizes[row.category] = sizes.get(row.category, 0) + size_bytes
    return found


def _names_nothing(row: ModuleBytes) -> bool:
    return not (row.unit or row.module)


def _unit_of(row: ModuleBytes) -> str:
    """`(AveragedModel)` is of no model that is trained, and stands by itself."""
    return row.unit or (row.module if row.module.startswith("(") else ROOT)
