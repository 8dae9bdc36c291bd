"""One figure of two runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Generic[_Number]):
    """One figure of two runs, measured in each. None: not recorded there, and then there is no difference either."""

    before: _Number | None
    after: _Number | None

    @property
    def difference(self) -> _Number | None:
        if self.before is None or self.after is None:
            return None
        return self.after - self.before

    @property
    def change_fraction(self) -> float | None:
        """(after - before) / before; None where that was 0."""
        difference = self.difference
        return difference / self.before if difference is not None and self.before else None
