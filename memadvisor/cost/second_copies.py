"""The second copy of what stage 3 frees after a forward, shared by few ranks (hpZ of ZeRO++, arXiv:2306.10209, 3.2).

A rank's part of a unit is made of the parameters before they are freed, and is free when the gather for the backward
is over.
"""

from __future__ import annotations

from collections.abc import Mapping

from memadvisor.cost.messages import Message
from memadvisor.cost.present import Present
from memadvisor.schedule import Action, Ranks


class SecondCopies:
    """This rank's parts that are there. `full_bytes`: of a unit's gathered parameters."""

    def __init__(self, full_bytes: Mapping[str, int], num_ranks: int) -> None:
        self._full_bytes = full_bytes
        self.parts = Present({name: size_bytes // num_ranks for name, size_bytes in full_bytes.items()})

    def leave(self, name: str) -> Message:
        """The parameters, which the copy is made of, are there too until it is."""
        self.parts.add(name)
        return Message(operation="copy", size_bytes=0, staging={"parameter": self._full_bytes[name]})

    def take(self, action: Action) -> Message:
        """The gather of it."""
        before_bytes = self.parts.total_bytes
        self.found(action)
        staging = {"parameter": before_bytes - self.parts.total_bytes}
        return Message(operation="all_gather", size_bytes=self._full_bytes[action.unit], staging=staging)

    def is_spent(self, action: Action) -> bool:
        """Whether this gathers ahead what a backward has used already."""
        return action.ranks is Ranks.SECONDARY and action.overlaps and action.unit not in self.parts

    def found(self, action: Action) -> None:
        """Parameters are there, or are being waited for."""
        if not action.overlaps:
            self.parts.discard(action.unit)
