"""The script's own optimizer on whole parameters, each owned by one rank.

For optimizers whose update needs a whole parameter, but no other one (independence.py): Muon, Adafactor, LAMB,
Shampoo. Each parameter belongs as a whole to one rank (owners.py), which alone keeps its state. While
`optimizer.step` runs, the groups hold the parameters that this rank owns, with whole values and gradients:

- stage 1: they are there;
- stages 2 and 3: each rank sends every owner what its shards hold of the owner's gradients, and with stage 3 of
  its parameters, so an owner receives what it owns and no more;
- afterwards each owner sends every rank what that rank's shard holds of the new values. From there on all is
  as after a step on pieces: with stages 1 and 2 shards are gathered to whole parameters.

So a rank moves (n-1)/n of what it owns each time, and holds beside what a step on pieces needs: with stage 2 its
own parameters' gradients, with stage 3 their values too, about P/n of each; and one flat's shard of staging.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.serialization import default_restore_location
from torch.utils._pytree import tree_leaves

from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.flat import Flat, Label, Slot
from memadvisor.engines.sharding.owners import Owners, Parts
from memadvisor.engines.sharding.released import hide, show_values
from memadvisor.engines.sharding.sharded_step import FindSlot, parameters_of, slots_of_saved
from memadvisor.errors import PlanError
from memadvisor.units import counted, format_bytes

Ask = Callable[[Slot, Owners], Any]


class OwnedSwap:
    """An optimizer whose groups hold what this rank owns; `finish` brings the new values to all ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        slot_of: FindSlot,
        owners: Owners,
        executor_of: Callable[[Flat], Executor],
        note: Callable[[str, str], None] = lambda level, text: None,
    ) -> None:
        self._optimizer = optimizer
        self._executor_of = executor_of
        self._groups: list[dict[str, Any]] = []
        self._lent: list[Slot] = []  # whose gradient's stand-in is put back afterwards
        slots = slots_of(optimizer, slot_of)
        by_flat: dict[int, list[Slot]] = {}
        for slot in slots:
            by_flat.setdefault(id(slot.flat), []).append(slot)
        self._parts = [Parts(of_flat[0].flat, of_flat, owners) for of_flat in by_flat.values()]
        self._values: list[torch.Tensor | None] = []
        with torch.no_grad():
            for parts in self._parts:
                self._take_gradients(parts)
                self._values.append(self._take_values(parts))
        elsewhere = {id(slot.parameter) for slot in slots if owners.is_elsewhere(slot)}
        others = [slot.parameter for slot in slots if id(slot.parameter) in elsewhere]
        # As loaded, made before the plan was applied, or by a method of the optimizer's that is not its step.
        _tell_of(optimizer, [optimizer.state.pop(parameter, None) for parameter in others], owners, note)
        for group in optimizer.param_groups:
            self._filter(group, elsewhere)

    def finish(self) -> None:
        """All ranks take part."""
        with torch.no_grad():
            for parts, values in zip(self._parts, self._values, strict=True):
                self._return_values(parts, values)
        self.undo()

    def undo(self) -> None:
        for group, held in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(held)
        for slot in self._lent:
            slot.parameter.grad = slot.token
        for parts, values in zip(self._parts, self._values, strict=True):
            if values is not None:
                for slot in parts.own_slots:
                    hide(slot, self._executor_of(parts.flat).lates)
        self._lent, self._parts, self._values = [], [], []

    def _filter(self, group: dict[str, Any], elsewhere: set[int]) -> None:
        keys = [key for key in ("params", "param_names") if key in group]
        self._groups.append({key: group[key] for key in keys})
        own = [id(parameter) not in elsewhere for parameter in group["params"]]
        for key in keys:
            group[key] = [value for value, is_own in zip(group[key], own, strict=True) if is_own]

    def _take_gradients(self, parts: Parts) -> None:
        flat = parts.flat
        if flat.grad_shard is None or not any(_is_sharded(slot) for slot in parts.slots):
            return
        for slot, gradient in parts.views(self._collect(parts, flat.grad_shard, "gradient")):
            if _is_sharded(slot):
                slot.parameter.grad = gradient
                self._lent.append(slot)

    def _take_values(self, parts: Parts) -> torch.Tensor | None:
        flat = parts.flat
        if flat.stage < 3 or flat.shard is None:
            return None
        part = self._collect(parts, flat.shard, "parameter")
        for slot, values in parts.views(part):
            show_values(slot, values)
        return part

    def _collect(self, parts: Parts, shard: torch.Tensor, category: str) -> torch.Tensor:
        """This rank's part, whose elements lie in all ranks' shards."""
        flat, sharded = parts.flat, self._executor_of(parts.flat).sharded
        part = torch.empty(parts.own_numel, dtype=shard.dtype, device=shard.device)
        sharded.label(part, category, flat.unit)
        sent = [
            _packed(shard, _first(flat), parts.runs(owner, flat.rank), sharded.label, flat.unit)
            for owner in range(flat.num_ranks)
        ]
        sharded.wire.all_to_all(sent, parts.stretches(part), flat.unit, flat.index)
        return part

    def _return_values(self, parts: Parts, values: torch.Tensor | None) -> None:
        """Bring new values from their owners into all ranks' shards."""
        flat, sharded = parts.flat, self._executor_of(parts.flat).sharded
        if flat.shard is None or flat.full is None:
            return
        runs = [parts.runs(owner, flat.rank) for owner in range(flat.num_ranks)]
        received = []
        for of_owner in runs:
            numel = sum(high - low for low, high in of_owner)
            if len(of_owner) == 1:
                received.append(_pieces(flat.shard, _first(flat), of_owner)[0])
                continue
            received.append(flat.shard.new_empty(numel))
            sharded.label(received[-1], "communication", flat.unit)
        if values is not None:
            sent = parts.stretches(values)
        else:
            sent = [
                _packed(flat.full, 0, parts.runs(flat.rank, rank), sharded.label, flat.unit)
                for rank in range(flat.num_ranks)
            ]
        sharded.wire.all_to_all(sent, received, flat.unit, flat.index)
        for of_owner, packed in zip(runs, received, strict=True):
            if len(of_owner) > 1:
                sizes = [high - low for low, high in of_owner]
                for piece, new in zip(
                    _pieces(flat.shard, _first(flat), of_owner), torch.split(packed, sizes), strict=True
                ):
                    piece.copy_(new)


def _is_sharded(slot: Slot) -> bool:
    return slot.token is not None and slot.parameter.grad is slot.token


def _first(flat: Flat) -> int:
    return flat.rank * flat.shard_numel


def _pieces(tensor: torch.Tensor, first: int, runs: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Runs of a flat's elements in a tensor that begins with element `first`."""
    return [tensor[low - first : high - first] for low, high in runs]


def _packed(
    tensor: torch.Tensor, first: int, runs: list[tuple[int, int]], label: Label, unit: str
) -> torch.Tensor:
    pieces = _pieces(tensor, first, runs)
    if len(pieces) == 1:
        return pieces[0]
    packed = torch.cat(pieces) if pieces else tensor[:0]
    label(packed, "communication", unit)
    return packed


def slots_of(optimizer: torch.optim.Optimizer, slot_of: FindSlot) -> list[Slot]:
    """Places of an optimizer's parameters that are updated in shards, in the order of its groups."""
    found = map(slot_of, parameters_of(optimizer))
    return list({id(slot): slot for slot in found if slot is not None}.values())


# ---- the optimizer's state, which owners keep --------------------------------------------------


def packed_state(state: Any) -> torch.Tensor:
    """What an optimizer keeps for one parameter, None where it keeps nothing, as bytes for another rank."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpacked_state(data: torch.Tensor, device: torch.device) -> Any:
    def place(storage: Any, location: str) -> Any:
        # Step counters stay on the host.
        return storage if location == "cpu" else default_restore_location(storage, str(device))  # type: ignore[no-untyped-call]

    # It comes through the ranks' rendezvous store, so nothing in it may run: tensors and plain values alone.
    try:
        return torch.load(io.BytesIO(data.numpy().tobytes()), map_location=place, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise PlanError(
            f"The optimizer keeps {found[1] if found else 'an object'} in its state, which is not read from another rank.",
            hint="use --zero 0, or keep tensors, numbers, strings, lists and dicts alone in its state.",
        ) from error


def with_others_states(
    result: dict[str, Any], optimizer: torch.optim.Optimizer, slot_of: FindSlot, owners: Owners, ask: Ask
) -> dict[str, Any]:
    """A state dict of this rank, completed by what the others own."""
    state = dict(result["state"])
    parameters = parameters_of(optimizer)
    for number, parameter in enumerate(parameters):
        slot = slot_of(parameter)
        if slot is not None and owners.is_elsewhere(slot):
            found = ask(slot, owners)
            if found is not None:
                state[number] = found

    def place(item: tuple[Any, Any]) -> int:
        return item[0] if isinstance(item[0], int) else len(parameters)

    return {**result, "state": dict(sorted(state.items(), key=place))}


def own_of_loaded(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], slot_of: FindSlot, owners: Owners
) -> dict[str, Any]:
    """A state dict without what other ranks own, before the optimizer copies it."""
    owners.assign(slots_of(optimizer, slot_of))
    slots = slots_of_saved(optimizer, state_dict, slot_of)
    if slots is None:
        return state_dict
    elsewhere = {number for number, slot in slots.items() if slot is not None and owners.is_elsewhere(slot)}
    state = {key: value for key, value in state_dict["state"].items() if key not in elsewhere}
    return {**state_dict, "state": state}


def _tell_of(
    optimizer: torch.optim.Optimizer, states: list[Any], owners: Owners, note: Callable[[str, str], None]
) -> None:
    """Once, of state of parameters that other ranks update, where it was made, or loaded, between two steps."""
    found = [state for state in states if state]
    if found and owners.has_stepped and not owners.has_told:
        owners.has_told = True
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        note(
            "warning",
            f"{type(optimizer).__name__} had state of {counted(len(found), 'parameter')} that another rank updates "
            f"({format_bytes(sum(tensor.nbytes for tensor in tensors))}), made or loaded outside of its step: no plan "
            "counts it, so more memory was taken than was predicted",
        )
    owners.has_stepped = True
