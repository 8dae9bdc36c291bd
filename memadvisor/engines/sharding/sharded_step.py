"""The script's own optimizer on this rank's shards. Those that need whole parameters: whole_step.py.

While `optimizer.step` runs, each sharded parameter in `param_groups` is replaced by the 1-D piece of it
that this rank owns, with its piece of the gradient; so groups, schedules and weight decay keep their
meaning, and the optimizer makes its state for the piece alone. At rest the groups hold the parameters,
and `optimizer.state` holds, under each parameter, the state of this rank's piece. `state_dict()` gives
whole tensors, put together from all ranks' pieces, and `load_state_dict` takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import optim

from memadvisor.cost.owners import ELEMENTWISE, SCALARS
from memadvisor.engines.sharding.flat import Slot
from memadvisor.engines.sharding.late import LateTensor

# Each element's update depends on that element alone, so a piece is updated as the whole would be.
_ELEMENTWISE = tuple(getattr(optim, name) for name in ELEMENTWISE)

# What a state dict calls the shards' own values, where they hold more digits than the parameters.
MASTER = "master"

FindSlot = Callable[[torch.Tensor], Slot | None]


def parameters_of(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """All that its groups hold, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether this rank's piece of a parameter is all that the optimizer needs of it."""
    return any(type(optimizer).step is kind.step for kind in _ELEMENTWISE)


class Swap:
    """An optimizer whose groups hold pieces; `undo` gives it its parameters back.

    with_state: its state too; without it whoever looks at gradients alone may swap any optimizer. only: ids of the
    parameters that the groups have meanwhile; None for all. gradient_of: this rank's piece of a gradient. label: is told
    of what is made for the step, with its category and unit.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        slot_of: FindSlot,
        *,
        with_state: bool = True,
        only: Container[int] | None = None,
        gradient_of: Callable[[Slot], torch.Tensor | None] | None = None,
        label: Callable[[torch.Tensor, str, str], None] = lambda tensor, category, unit: None,
    ) -> None:
        self._optimizer = optimizer
        self._with_state = with_state
        self._gradient_of = gradient_of or gradient_piece
        self._label = label
        self._groups: list[list[torch.Tensor]] = []
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in optimizer.param_groups:
            self._groups.append(group["params"])
            group["params"] = [
                self._replacement(parameter, slot_of)
                for parameter in group["params"]
                if only is None or id(parameter) in only
            ]

    def finish(self) -> None:
        self.undo()

    def undo(self) -> None:
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"] = parameters
        for parameter, piece in self._pieces:
            if piece in self._optimizer.state:
                self._optimizer.state[parameter] = self._optimizer.state.pop(piece)

    def _replacement(self, parameter: torch.Tensor, slot_of: FindSlot) -> torch.Tensor:
        slot = slot_of(parameter)
        if slot is None or (shard := slot.flat.shard) is None:
            return parameter
        piece = slot.piece(shard).detach()
        piece.grad = self._gradient_for(slot)
        state = self._optimizer.state
        if self._with_state and parameter in state:
            state[piece] = shard_state(state.pop(parameter), slot)
        self._pieces.append((parameter, piece))
        return piece

    def _gradient_for(self, slot: Slot) -> torch.Tensor | None:
        """In the optimizer's dtype: where stage 1 has masters, whole gradients are as narrow as the parameters."""
        gradient = self._gradient_of(slot)
        if gradient is None or gradient.dtype == slot.flat.dtype:
            return gradient
        widened = gradient.to(slot.flat.dtype)
        self._label(widened, "gradient", slot.flat.unit)
        return widened


def gradient_piece(slot: Slot) -> torch.Tensor | None:
    """This rank's piece of a parameter's gradient; None where it has none."""
    gradient = slot.parameter.grad
    if gradient is None:
        return None
    flat = slot.flat
    if gradient is slot.token:
        shard = flat.grad_shard
        return None if shard is None else slot.piece(shard)
    low, high = slot.own_range
    buffer = flat.grad
    if buffer is not None and gradient.data_ptr() == buffer.data_ptr() + slot.start * buffer.itemsize:
        return buffer[low:high]
    return slot.flattened(gradient)[low - slot.start : high - slot.start]


def shard_state(state: Any, slot: Slot) -> Any:
    """An optimizer's state of a parameter with whole tensors cut down to this rank's piece, as wide as its masters."""
    if not isinstance(state, dict):
        return state
    return {key: _widened(key, _piece_of(key, value, slot), slot) for key, value in state.items()}


def _widened(key: str, value: Any, slot: Slot) -> Any:
    """State that was made before there were masters is as narrow as the parameter."""
    is_narrow = slot.flat.has_masters and isinstance(value, torch.Tensor) and key not in SCALARS
    return value.to(slot.flat.dtype) if is_narrow else value


def _piece_of(key: str, value: Any, slot: Slot) -> Any:
    if type(value) is LateTensor:
        if value.source.is_live(slot, key):
            return value.source.piece()
        value = value.source.values()
    if not _is_whole(key, value, slot):
        return value
    low, high = slot.own_range
    return slot.flattened(value)[low - slot.start : high - slot.start].clone()


def _is_whole(key: str, value: Any, slot: Slot) -> bool:
    if not isinstance(value, torch.Tensor) or key in SCALARS or value.shape != slot.shape:
        return False
    low, high = slot.own_range
    return value.dim() != 1 or value.numel() != high - low  # else the piece is the whole already


def whole_state(state: Any, slot: Slot, fetch: Callable[[Slot, str, torch.Tensor], torch.Tensor]) -> Any:
    """An optimizer's state of a parameter with this rank's pieces made whole."""
    if not isinstance(state, dict):
        return state
    return {
        key: fetch(slot, key, value) if isinstance(value, torch.Tensor) and key not in SCALARS else value
        for key, value in state.items()
    }


def pieces_of_loaded(
    optimizer: optim.Optimizer, state_dict: dict[str, Any], slot_of: FindSlot
) -> dict[str, Any]:
    """A state dict with whole tensors, cut down to this rank's pieces before the optimizer copies it."""
    slots = slots_of_saved(optimizer, state_dict, slot_of)
    if slots is None:
        return state_dict
    state = dict(state_dict["state"])
    for number, values in state.items():
        slot = slots.get(number)
        if slot is not None:
            state[number] = shard_state(values, slot)
    return {**state_dict, "state": state}


def slots_of_saved(
    optimizer: optim.Optimizer, state_dict: dict[str, Any], slot_of: FindSlot
) -> dict[Any, Slot | None] | None:
    """Places of the live parameters by the numbers that a state dict has for them.

    None where it is for another number of parameters: torch says what is wrong with it.
    """
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    live = parameters_of(optimizer)
    if len(saved) != len(live):
        return None
    return {number: slot_of(parameter) for number, parameter in zip(saved, live, strict=True)}
