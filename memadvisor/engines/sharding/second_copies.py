"""Second copies of stage 3's parameters, so that gathers for the backward stay among near ranks.

This is hpZ of ZeRO++ (arXiv:2306.10209, section 3.2). Where the schedule says so, what is freed after a forward leaves
on each rank a slice of what was there, and ranks that follow each other, those of one machine as a rule, have all
slices among them. It is made of what was computed with, so the backward computes with the same numbers, whatever
gathers round. Unlike ZeRO++'s it is no more than that: it is freed by the gather that uses it, and made anew by the next
forward.

A rank has its slice exactly where its neighbours have theirs: slices come with the forward of a training pass, which all
ranks take together, and go with the gather that all take part in, with the end of the backward, the next training
pass or the optimizer step, or when the script writes parameters, which all ranks meet for.
"""

from __future__ import annotations

import torch

from memadvisor.engines.collectives.groups import give_back, near
from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.lanes.lanes import Ticket
from memadvisor.engines.sharding.flat import Flat, Label
from memadvisor.schedule import Schedule


def second_copies(schedule: Schedule, wire: Wire, number: int, label: Label) -> SecondCopies | None:
    """Those of a schedule that has any."""
    ranks = schedule.secondary_ranks
    return None if ranks is None else SecondCopies(wire, ranks, number, label)


class SecondCopies:
    """Of one model. They travel on the lane of `wire`, so in one order with all else.

    num_ranks: how many share a copy. label: is told of each slice that is made, with its category and unit.
    """

    def __init__(self, wire: Wire, num_ranks: int, number: int, label: Label) -> None:
        self._group = near(wire.group, num_ranks)
        self._wire = Wire(self._group, lambda _: None, number, wire.lane, algorithms=wire.algorithms)
        self._label = label

    def keep(self, flat: Flat) -> None:
        """The parameters are about to be freed: copy this rank's slice."""
        if flat.full is not None and flat.present:
            with torch.no_grad():
                flat.second = flat.full.chunk(self._wire.num_ranks)[self._wire.rank].clone()
            self._label(flat.second, "parameter", flat.unit)

    def begin_gather(self, full: torch.Tensor, second: torch.Tensor, flat: Flat) -> Ticket:
        """Begin to fill `full`, which is `flat`'s."""
        return self._wire.begin_gather(full, second, flat.unit, flat.index)

    def gather(self, full: torch.Tensor, second: torch.Tensor, flat: Flat) -> None:
        """The same, and wait for it."""
        self._wire.gather(full, second, flat.unit, flat.index)

    def close(self) -> None:
        """Let others use the group."""
        give_back(self._group)
