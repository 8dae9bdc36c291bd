"""What the script sees of an optimizer's state: all of it, whole, on every rank.

`state_dict()` puts together what lies on the ranks, whoever calls it; `load_state_dict` keeps what is this rank's.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memadvisor.cost.owners import SCALARS
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.flat import Flat, Slot
from memadvisor.engines.sharding.masters import piece_of_masters, show_masters, take_written
from memadvisor.engines.sharding.owners import Owners
from memadvisor.engines.sharding.sharded_step import (
    MASTER,
    FindSlot,
    parameters_of,
    pieces_of_loaded,
    slots_of_saved,
    whole_state,
)
from memadvisor.engines.sharding.sources import meet_checkpoints
from memadvisor.engines.updates.whole_step import (
    own_of_loaded,
    packed_state,
    unpacked_state,
    with_others_states,
)


class OptimizerStates:
    """`owners`: of the optimizers that need whole parameters. `meet` is told of one that loads its state."""

    def __init__(
        self,
        slot_of: FindSlot,
        executor_of: Callable[[Flat], Executor],
        owners: Mapping[torch.optim.Optimizer, Owners],
        meet: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._slot_of = slot_of
        self._executor_of = executor_of
        self._owners = owners
        self._meet = meet
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()

    def tell_apart(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is met, by all ranks in one order: others may have, or have had, the same parameters."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)

    def patch(self, undo: Undo) -> None:
        base = torch.optim.Optimizer
        original_state, original_load = base.state_dict, base.load_state_dict
        meet = partial(meet_checkpoints, undo)

        def state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
            meet()
            return self._whole(optimizer, original_state(optimizer))

        def load_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            own, wide, loaded = self._without_masters(optimizer, self._own(optimizer, state_dict))
            original_load(optimizer, own)
            for parameter, state in wide:
                optimizer.state[parameter] = {**optimizer.state[parameter], **state}
            for flat in loaded:
                show_masters(self._executor_of(flat).sharded.wire, flat)
            for executor in self._executors_of(optimizer):
                executor.sharded.num_writes += (
                    1  # who asks for states from here on waits until they are loaded
                )

        undo.replace(base, "state_dict", state_dict)
        undo.replace(base, "load_state_dict", load_state_dict)

    def _whole(self, optimizer: torch.optim.Optimizer, result: dict[str, Any]) -> dict[str, Any]:
        owners = self._owners.get(optimizer)
        if owners is not None:
            return with_others_states(result, optimizer, self._slot_of, owners, self.from_owner)
        for number, parameter in enumerate(parameters_of(optimizer)):
            slot = self._slot_of(parameter)
            if slot is None:
                continue
            self._executor_of(slot.flat).early.read(slot.flat)
            if number in result["state"]:
                state = result["state"][number]
                if slot.flat.has_masters and slot.flat.shard is not None and isinstance(state, dict):
                    state = {**state, MASTER: slot.piece(slot.flat.shard)}
                result["state"][number] = whole_state(state, slot, partial(self._late, optimizer))
        return result

    def _late(
        self, optimizer: torch.optim.Optimizer, slot: Slot, key: str, own: torch.Tensor
    ) -> torch.Tensor:
        name = self.name_of(optimizer, key)
        return (
            self._executor_of(slot.flat).lates.tensor(slot, name, own.dtype) if slot.end > slot.start else own
        )

    def name_of(self, optimizer: torch.optim.Optimizer, key: str) -> str:
        """What ranks ask each other for, where they want a state of this optimizer's."""
        return key if key == MASTER else f"{self._numbers[optimizer]}:{key}"

    def _own(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        if any(self._slot_of(parameter) is not None for parameter in parameters_of(optimizer)):
            self._keep_replaced(optimizer, state_dict)
            self._meet(optimizer)
        owners = self._owners.get(optimizer)
        if owners is None:
            return pieces_of_loaded(optimizer, state_dict, self._slot_of)
        return own_of_loaded(optimizer, state_dict, self._slot_of, owners)

    def _without_masters(
        self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
    ) -> tuple[dict[str, Any], list[tuple[torch.nn.Parameter, dict[str, Any]]], list[Flat]]:
        """This rank's pieces without masters, which go into the shards of the flats that are given too; and those that
        torch would round."""
        slots = slots_of_saved(optimizer, state_dict, self._slot_of) or {}
        states = dict(state_dict["state"])
        wide: list[tuple[torch.nn.Parameter, dict[str, Any]]] = []
        loaded: dict[int, Flat] = {}
        for number, slot in slots.items():
            state = states.get(number)
            if (
                slot is None
                or not slot.flat.has_masters
                or slot.flat.shard is None
                or not isinstance(state, dict)
            ):
                continue
            state = dict(state)
            master = state.pop(MASTER, None)
            if master is not None:
                if id(slot.flat) not in loaded:
                    take_written([slot.flat])  # into its other parameters, of which perhaps nothing is loaded
                loaded[id(slot.flat)] = slot.flat
                slot.piece(slot.flat.shard).copy_(master)
            states[number] = state
            pieces = {
                key: value.to(slot.flat.dtype)
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and key not in SCALARS
            }
            wide.append((slot.parameter, pieces))
        return {**state_dict, "state": states}, wide, list(loaded.values())

    def _keep_replaced(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """What the script has of the state that is about to be replaced is the old one."""
        loaded = tree_leaves(state_dict["state"])
        for executor in self._executors_of(optimizer):
            executor.lates.keep(states_alone=True, but=loaded)
            executor.sharded.meet()  # from here on ranks have new values

    def _executors_of(self, optimizer: torch.optim.Optimizer) -> list[Executor]:
        flats = (slot.flat for slot in map(self._slot_of, parameters_of(optimizer)) if slot is not None)
        executors = {id(executor): executor for executor in map(self._executor_of, flats)}
        return sorted(executors.values(), key=lambda executor: executor.number)  # alike on all ranks

    # ---- between ranks -----------------------------------------------------------------------

    def state_of(self, slot: Slot, name: str) -> torch.Tensor | None:
        """This rank's piece of a state, by what `name_of` calls it."""
        if name == MASTER:
            return None if slot.flat.shard is None else piece_of_masters(slot)
        number, _, key = name.partition(":")
        for optimizer, found in list(self._numbers.items()):
            if str(found) == number:
                value = optimizer.state.get(slot.parameter, {}).get(key)
                return value if isinstance(value, torch.Tensor) else None
        return None

    def owned_state(self, slot: Slot, number: int) -> torch.Tensor:
        """All that optimizer `number` keeps here for a parameter, as bytes."""
        for optimizer, owners in list(self._owners.items()):
            if owners.number == number:
                return packed_state(optimizer.state.get(slot.parameter))
        raise KeyError(number)

    def from_owner(self, slot: Slot, owners: Owners) -> Any:
        """All that the owner of a parameter keeps for it; None for nothing."""
        owner = owners.of(slot)
        if owner is None:
            raise AssertionError("a parameter without an owner")
        service = self._executor_of(slot.flat).service
        return unpacked_state(service.fetch_owned_state(slot, owners.number, owner), slot.flat.device)
