"""All-reduces of gradients that are under way: what their messages hold, and what they have in memory beside the gradients.

A compressed one has messages of its own. Of those that share a message (memadvisor/merged_reductions.py) the last one that
is played sends it, and all of it is there in one buffer more. Both stay until the backward ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from memadvisor.cost.packing import Packing
from memadvisor.schedule import Action


class AllReduces:
    """`gradient_bytes`: by unit. packed: units whose messages are compressed."""

    def __init__(self, gradient_bytes: Mapping[str, int], packed: Mapping[str, Packing]) -> None:
        self._gradient_bytes = gradient_bytes
        self._packed = packed
        self._waiting: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
        self._staged: dict[str, int] = {}  # by the unit that a message goes with
        self.staging_bytes = 0  # all of it

    def items(self) -> Iterable[tuple[str, int]]:
        """Staging by unit."""
        return self._staged.items()

    def begin(self, action: Action) -> int:
        """Bytes of the message that goes now; 0 where it waits for others."""
        name = action.unit
        if action.units:
            return self._merge(action)
        if name not in self._packed:
            return self._gradient_bytes.get(name, 0)
        self._stage(name, self._packed[name].all_reduce_staging_bytes)
        return self._packed[name].all_reduce_bytes

    def _merge(self, action: Action) -> int:
        units = self._waiting[action.units]
        units.append(action.unit)
        if len(units) < len(action.units):
            return 0
        size_bytes = sum(self._gradient_bytes.get(unit, 0) for unit in units)
        self._stage(action.unit, size_bytes)
        units.clear()
        return size_bytes

    def _stage(self, name: str, size_bytes: int) -> None:
        self.staging_bytes += size_bytes - self._staged.get(name, 0)
        self._staged[name] = size_bytes

    def end(self) -> None:
        """The backward ends."""
        self._staged.clear()
        self.staging_bytes = 0
