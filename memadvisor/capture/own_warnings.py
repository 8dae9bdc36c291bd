"""Warnings of Python and torch that are about memadvisor, and which the script is therefore not to see.

Their rules are put into Python's list by hand: `warnings.filterwarnings` has what the script was once warned of be
shown once more. They are taken out by hand, too, since the script may have put others before them.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Silence:
    """Of warnings whose text begins with what the regular expression `message` matches."""

    message: str
    category: type[Warning]

    def begin(self) -> None:
        filters: Any = warnings.filters
        if self._rule() not in filters:
            filters.insert(0, self._rule())

    def end(self) -> None:
        filters: Any = warnings.filters
        if self._rule() in filters:
            filters.remove(self._rule())

    def _rule(self) -> tuple[Any, ...]:
        return ("ignore", re.compile(self.message), self.category, None, 0)
