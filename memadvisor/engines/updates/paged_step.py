"""An optimizer step unit by unit, with each unit's state brought in before its update and put away after it.

Two buffers take turns: while one unit is updated in the first, the state of the unit before is written from the second,
and then that of the next unit is read into it. So at most two units' states are in memory, and both buffers go when the
step is over. State in codes (coded_tier.py) needs one buffer alone, as nothing runs beside the updates. State that the
optimizer makes in its first step is put away from where it has made it.

At every moment `optimizer.state` tells the truth: a plain tensor is the state, a late one (parcels.py) says where it
is. Of a DTensor (a script's FSDP2) the part that this rank has is such a one, and the DTensor stays. So a step that is
interrupted, or a tier that fails, leaves nothing to repair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memadvisor.coded_states import is_coded
from memadvisor.cost.owners import SCALARS
from memadvisor.engines.lanes.coded_tier import CodedTier, codes_in
from memadvisor.engines.lanes.lanes import Ticket
from memadvisor.engines.lanes.tiers import Tier
from memadvisor.engines.script.live import local_part
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.late import LateTensor
from memadvisor.engines.sharding.parcels import Failed, Parcel
from memadvisor.engines.sharding.sharded_step import FindSlot
from memadvisor.engines.sharding.unit_step import LabelAs, step_only
from memadvisor.engines.updates.update_buffers import UpdateBuffers
from memadvisor.run.torch_names import dtype_name
from memadvisor.schedule import Action, ActionKind

Optimizer = torch.optim.Optimizer
LabelState = Callable[[torch.Tensor, str], None]  # tensor, unit
Parameters = list[torch.nn.Parameter]


@dataclass(slots=True, eq=False, weakref_slot=True)
class Kept:
    """What one optimizer keeps on a tier, by unit. `has_failed`: the tier takes nothing more."""

    tier: Tier
    failed: Failed
    parcels: dict[str, Parcel] = field(default_factory=dict)
    has_failed: bool = False
    num_steps: int = 0

    def codes(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Codes in the device's memory, with their units."""
        for unit, parcel in self.parcels.items():
            yield from ((codes, unit) for codes in codes_in(parcel.block))


class PagedStep:
    """One step of an optimizer over the units of a model; `members` are its parameters among theirs, by unit. `prepare` is
    called with a unit before its update."""

    def __init__(
        self,
        optimizer: Optimizer,
        members: Mapping[str, Parameters],
        kept: Kept,
        slot_of: FindSlot,
        label: LabelState,
        label_as: LabelAs,
        prepare: Callable[[str], None] = lambda unit: None,
    ) -> None:
        self._optimizer = optimizer
        self._prepare = prepare
        self._members = members
        self._kept = kept
        self._slot_of = slot_of
        self._label = label
        self._label_as = label_as
        self._is_coded = isinstance(kept.tier, CodedTier)
        self._sides = {unit: 0 if self._is_coded else place % 2 for place, unit in enumerate(members)}
        self._buffers: dict[int, torch.Tensor] = {}
        self._writing: dict[int, Parcel] = {}  # by the buffer that it is written from
        self._reading: dict[str, Ticket] = {}
        self._handed: dict[str, list[torch.Tensor]] = {}  # views of a buffer that stand in the state
        self._unsettled: list[Parcel] = []
        flats = {unit: self._paged_flats(parameters) for unit, parameters in members.items()}
        self._flats = UpdateBuffers(flats, self._sides, label_as)
        self.moved_bytes = 0  # read and written
        self.waited_s = 0.0  # for transfers and codes, in which nothing was updated

    def play(self, actions: Iterable[Action]) -> None:
        """Update the units whose state is put away, in the order of `actions`."""
        self.make_buffers()
        self._flats.make_buffers()
        try:
            for action in actions:
                if action.unit not in self._members:
                    continue
                if action.kind is ActionKind.PREFETCH:
                    self._prefetch(action.unit)
                    self._flats.prefetch(action.unit)
                elif action.kind is ActionKind.UPDATE:
                    self._bring(action.unit)
                    self._flats.bring(action.unit)
                    self._update(action.unit)
                elif action.kind is ActionKind.OFFLOAD:
                    self.put_away(action.unit)
                    self._flats.put_away(action.unit)
        finally:
            self.finish()
            self.moved_bytes += self._flats.moved_bytes
            self.waited_s += self._flats.waited_s

    def finish(self) -> None:
        """Wait until all of it is written, and let go of the buffers."""
        for ticket in self._reading.values():
            ticket.join()  # else it would write into memory that is given away
        self._flats.finish()
        self._settle(but=0)
        self._reading.clear()
        self._writing.clear()
        self._buffers.clear()

    # ---- in ----------------------------------------------------------------------------------

    def make_buffers(self) -> list[torch.Tensor]:
        """For the state of the units that take turns, unless they are there."""
        for side in set(self._sides.values()) - self._buffers.keys():
            if self._largest_bytes(side):
                self._buffers[side] = self._new_buffer(side)
        return list(self._buffers.values())

    def _largest_bytes(self, side: int) -> int:
        """What is read into one of the buffers at most."""
        parcels = (self._kept.parcels.get(unit) for unit, own in self._sides.items() if own == side)
        return max((p.size_bytes for p in parcels if p is not None and p.memory is None), default=0)

    def _new_buffer(self, side: int) -> torch.Tensor:
        size_bytes = self._largest_bytes(side)
        device = next(parameter.device for unit in self._members.values() for parameter in unit)
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._label(buffer, "")
        return buffer

    def _prefetch(self, unit: str) -> None:
        """Begin to read a unit's state into the buffer that the one before the last was written from."""
        parcel, side = self._kept.parcels.get(unit), self._sides[unit]
        if parcel is None or parcel.memory is not None or unit in self._reading:
            return
        before = self._writing.pop(side, None)
        writes = before.writes if before is not None else []
        if side not in self._buffers:  # what was there has to stay
            self._buffers[side] = self._new_buffer(side)
        self._reading[unit] = parcel.read_into(self._buffers[side], after=writes)

    def _bring(self, unit: str) -> None:
        """Have plain tensors stand in the state of a unit."""
        parcel = self._kept.parcels.get(unit)
        tensors = None if parcel is None else self._arrived(unit, parcel)
        self._handed.pop(unit, None)
        if parcel is not None and tensors is not None:
            handed = [self._hand_out(parcel, place, tensor) for place, tensor in enumerate(tensors)]
            if all(handed) and parcel.memory is None:
                self._handed[unit] = tensors
        for parameter in self._members[unit]:
            for key, value in self._state_of(parameter):
                if type(late := local_part(value)) is LateTensor:  # as from another optimizer's state dict
                    source = late.source
                    plain = source.copy().as_strided(source.shape, source.stride)
                    put_into(self._optimizer.state[parameter], key, plain)

    def _arrived(self, unit: str, parcel: Parcel) -> list[torch.Tensor]:
        if parcel.memory is not None:
            return parcel.memory
        side = self._sides[unit]
        start_s = time.perf_counter()
        try:
            self._prefetch(unit)
            self._reading.pop(unit).wait()
            self.moved_bytes += parcel.size_bytes
        except OSError:
            # Perhaps what was to be written from the buffer before could not be, and is there alone.
            self._buffers[side] = self._new_buffer(side)
            try:
                parcel.read_into(self._buffers[side]).wait()
            except OSError as error:
                raise RuntimeError(
                    f"The optimizer's state of unit {unit!r} cannot be read back from disk: {error.strerror or error}. "
                    "Training cannot go on rightly from here; start again from a checkpoint."
                ) from error
        self.waited_s += time.perf_counter() - start_s
        return [entry.view(self._buffers[side]) for entry in parcel.entries]

    def _hand_out(self, parcel: Parcel, place: int, tensor: torch.Tensor) -> bool:
        """Put a tensor into the state where the parcel's stood. False: something else has come there."""
        entry, source = parcel.entries[place], parcel.sources[place]
        parameter = entry.parameter()
        state = None if parameter is None else self._optimizer.state.get(parameter)
        value = local_part(state.get(entry.key)) if isinstance(state, dict) else None
        if state is None or type(value) is not LateTensor or value.source is not source:
            return False
        put_into(state, entry.key, tensor if source.kept is None else source.kept)
        return source.kept is None

    # ---- update ------------------------------------------------------------------------------

    def _update(self, unit: str) -> None:
        self._prepare(unit)
        only = {id(parameter) for parameter in self._members[unit]}
        step_only(self._optimizer, only, self._slot_of, self._label_as)

    # ---- out ---------------------------------------------------------------------------------

    def put_away(self, unit: str) -> None:
        """Begin to write a unit's state, and wait until that of the unit before is written."""
        found = [
            (parameter, key, part)
            for parameter in self._members[unit]
            for key, value in self._state_of(parameter)
            if self._is_movable(parameter, key, part := local_part(value))
        ]
        handed, side = self._handed.pop(unit, None), self._sides[unit]
        if self._kept.has_failed:
            self._kept.parcels.pop(unit, None)
            self._buffers.pop(side, None)  # the state stays in it
            return
        if not found:
            return
        start_s, parcel = time.perf_counter(), self._kept.parcels.get(unit)
        if parcel is not None and handed is not None and _are_same(found, handed):
            parcel.write_back(self._buffers[side], handed)
        else:
            parcel = self._kept.parcels[unit] = Parcel(self._kept.tier, found, self._kept.failed)
            for codes in codes_in(parcel.block):
                self._label(codes, unit)
        self.waited_s += time.perf_counter() - start_s
        self._writing[side] = parcel
        for entry, source in zip(parcel.entries, parcel.sources, strict=True):
            parameter = entry.parameter()
            if parameter is not None:
                put_into(self._optimizer.state[parameter], entry.key, LateTensor(source))
        self.moved_bytes += parcel.size_bytes
        self._unsettled.append(parcel)
        self._settle(but=0 if self._is_coded else 1)

    def _settle(self, *, but: int) -> None:
        start_s = time.perf_counter()
        while len(self._unsettled) > but:
            self._unsettled.pop(0).settle()
        self.waited_s += time.perf_counter() - start_s

    def _paged_flats(self, parameters: Parameters) -> list[Flat]:
        """Those that lie elsewhere themselves."""
        slots = (self._slot_of(parameter) for parameter in parameters)
        flats = {
            id(slot.flat): slot.flat for slot in slots if slot is not None and slot.flat.page is not None
        }
        return list(flats.values())

    def _state_of(self, parameter: torch.Tensor) -> Iterator[tuple[str, Any]]:
        state = self._optimizer.state.get(parameter)
        yield from list(state.items()) if isinstance(state, dict) else ()

    def _is_movable(self, parameter: torch.Tensor, key: str, value: Any) -> bool:
        """Whether it is a state with an element for each of the parameter's that this rank updates."""
        if type(value) is not torch.Tensor or key in SCALARS or not value.numel():
            return False
        if self._is_coded and not is_coded(
            key, self._optimizer.state[parameter], dtype_name(value.dtype), parameter.numel()
        ):
            return False
        slot = self._slot_of(parameter)
        if slot is None:
            is_full = value.shape == local_part(parameter).shape
        else:
            low, high = slot.own_range
            is_full = value.numel() == high - low
        dense = value.layout is torch.strided and torch.ops.aten.is_non_overlapping_and_dense(value)
        return is_full and bool(dense) and value.device == parameter.device


def put_into(state: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
    """Have a tensor stand in an optimizer's state of a parameter: for a DTensor's part, if there is one."""
    if hasattr(value := state[key], "_local_tensor"):
        if type(tensor) is LateTensor:
            tensor.source.layout = value._spec
        value._local_tensor = tensor
    else:
        state[key] = tensor


def _are_same(found: list[tuple[Any, str, torch.Tensor]], handed: list[torch.Tensor]) -> bool:
    return len(found) == len(handed) and all(
        value is tensor for (_, _, value), tensor in zip(found, handed, strict=True)
    )
