"""A live model as its ranks share it, and how far this rank has come with it: what all parts of an executor know.

It is below them all and calls none of them. What a part needs of another is handed to it when it is made, from below to
above (docs/engines/internals.md, "Inside an executor"); so none of them knows the executor, which makes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.sharding.build_units import build_units
from memadvisor.engines.sharding.flat import Flat, Label, Note
from memadvisor.engines.sharding.loose_gradients import loose_gradients
from memadvisor.engines.sharding.one_process import wire_of
from memadvisor.engines.sharding.second_copies import second_copies
from memadvisor.engines.sharding.transfers import Transfers
from memadvisor.errors import PlanError
from memadvisor.schedule import Schedule


class ShardedModel:
    """Units with their flats, the way to the other ranks, and where the training is.

    number: in order of construction among the models of a process, the same on all ranks. is_alone: there is no other
    rank, and no DDP. any_order: ranks may use different parameters (find_unused_parameters). unit: whose staging is
    being allocated.

    collective: whether the pass under way is one that all ranks take together. asks: whether it is, but in any order,
    and each rank asks for what it needs. in_forward: the model's own.

    num_steps, num_backwards, num_writes, in_step: how far this rank has come, which a service thread needs to know
    before it answers. num_changes: writes into sharded gradients that have begun; read_before_changes: of those since all
    ranks met last, by their number, whether this rank had read gradients by then. digest: of what has been sent since the
    first step.
    """

    def __init__(
        self,
        live: LiveModel,
        schedule: Schedule,
        ddp: Any,
        hooks: Hooks,
        label: Label,
        note: Note,
        *,
        any_order: bool,
        number: int,
    ) -> None:
        self.live = live
        self.schedule = schedule
        self.hooks = hooks
        self.label = label
        self.note = note
        self.number = number
        self.is_alone = ddp is None
        self.any_order = any_order
        self.unit = ""
        self.wire = wire_of(ddp, schedule, number, lambda staged: label(staged, "communication", self.unit))
        self.transfers = Transfers(self.wire, second_copies(schedule, self.wire, number, label))
        self.units = build_units(live, schedule, self.wire.rank, self.wire.num_ranks)
        self.flats = [flat for unit in self.units.values() for flat in unit.flats]
        self.slots = [slot for flat in self.flats for slot in flat.slots]
        for index, slot in enumerate(self.slots):
            slot.index = index
        for flat in self.flats:
            flat.loose = loose_gradients(flat, label)
        self.num_shared_stages = max((unit.stage for unit in self.units.values()), default=0)  # the highest
        self.collective = False
        self.asks = False
        self.in_forward = False
        self.digest = 0
        self.num_steps = 0
        self.num_backwards = 0
        self.num_writes = 0
        self.num_changes = 0
        self.read_before_changes: dict[int, bool] = {}
        self.in_step = False
        self._met_after = -1  # how many backwards there had been when all ranks met last
        self._has_read = False  # gradients, since then

    @property
    def computes(self) -> bool:
        """Whether who reads a parameter now is the model, which computes with it, and not the script."""
        return self.in_forward or self.hooks.in_backward

    @property
    def progress(self) -> list[int]:
        return [self.num_steps, self.num_backwards, self.num_writes]

    def remember(self, operation: str, flat: Flat) -> None:
        """All ranks are to send the same in one order; at the step they compare."""
        self.digest = zlib.crc32(f"{operation} {flat.index}".encode(), self.digest)

    # ---- meeting the other ranks -------------------------------------------------------------

    def meet(self, is_so: bool = False) -> bool:
        """Wait for all ranks: whatever they read before this point of the program, they have read. Gives whether any of
        them says that it is so."""
        [found] = self.wire.largest([int(is_so)])
        self.have_met()
        return bool(found)

    def have_met(self) -> None:
        """All ranks have just taken part in a collective."""
        self._met_after = self.num_backwards
        self._has_read = False
        self.read_before_changes.clear()

    def has_read_gradients(self) -> None:
        """The script has asked other ranks for a gradient."""
        self._has_read = True

    def meet_before_writes(self, all_have_read: Callable[[int], bool]) -> None:
        """The script changes sharded gradients, on every rank: none may still read those of the last backward, nor, where it
        reads between changes, those that the change before has left. `all_have_read` asks the others whether they have
        read, too, before the change of this number. Raises PlanError where they have not: they do not wait."""
        number = self.num_changes + 1
        self.read_before_changes[number] = self._has_read
        self.num_changes = number  # told last: others ask once this is there
        if self._met_after != self.num_backwards:
            self.meet()
        elif self._has_read:
            if not all_have_read(number):
                raise PlanError(
                    "The script reads gradients on some ranks between changes of them, which cannot be done on the shards that "
                    "ZeRO stages 2 and 3 keep.",
                    hint="read them on all ranks, or before the first change; or use --zero 1, which keeps whole gradients.",
                )
            self.meet()
