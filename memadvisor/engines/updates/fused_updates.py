"""The script's own optimizers with torch's fused update, whatever they were made with.

Which update an optimizer runs is written in its groups (`fused`, `foreach`) and read in each step, so they are written
there before the first step, and whoever asks for a state dict gets the script's own settings. A fused update on a GPU
counts steps there and not on the host, in float32: counts are moved before a step, and moved back in state dicts and when
the engine is taken off. Left alone are groups that the script made fused itself, and those that no fused update takes:
with `differentiable`, with parameters that are no real floating-point numbers, or with sparse gradients. A fused update
also goes through memory in its order, whatever the strides (on a CPU without a word; measured with torch 2.13): it is
right where a parameter has no gaps, and its gradient and states are laid out as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memadvisor.cuda_graphs import is_capturing
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.sharded_step import FindSlot
from memadvisor.engines.updates.closures import just_before_update
from memadvisor.fused_updates import FUSED_OPTIMIZERS
from memadvisor.never_compiled import called_by_python
from memadvisor.run.torch_names import dtype_name

Note = Callable[[str, str], None]
Optimizer = torch.optim.Optimizer

_KINDS = tuple(getattr(torch.optim, name) for name in FUSED_OPTIMIZERS)
_COUNT = "step"  # the state that a fused update keeps on the device
_WORDS = ("fused", "foreach")
_TYPES = (torch.Tensor, torch.nn.Parameter)  # DTensors are recognised by their mesh
_Words = tuple[bool | None, bool | None]
_DEVICES = ("cpu", "cuda")


@dataclass(slots=True)
class _Known:
    """An optimizer's groups as the script has them, by their place, where they are ours now; and places left alone."""

    words: dict[int, _Words]
    alone: set[int]


class FusedUpdates:
    """From construction until `undo` runs, of every optimizer that steps. Parameters with a slot are updated in pieces,
    which are plain tensors without gaps, whatever the script sees of them."""

    def __init__(self, slot_of: FindSlot, note: Note, undo: Undo) -> None:
        self._slot_of = slot_of
        self._note = note
        self._known: weakref.WeakKeyDictionary[Optimizer, _Known] = weakref.WeakKeyDictionary()
        self._told: set[str] = set()
        undo.add(self._give_back)
        undo.add(register_optimizer_step_pre_hook(called_by_python(self._before_step)).remove)
        self._patch(undo)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if is_capturing():
            return None
        return just_before_update(args, kwargs, lambda: self._fuse(optimizer))

    def _fuse(self, optimizer: Optimizer) -> None:
        if not any(type(optimizer).step is kind.step for kind in _KINDS):
            self._tell(f"{type(optimizer).__name__} has no fused update, and steps as it does")
            return
        known = self._known.setdefault(optimizer, _Known({}, set()))
        for place, group in enumerate(optimizer.param_groups):
            is_ours = place in known.words
            if place in known.alone:
                continue
            if group.get("fused") and not is_ours:
                self._tell(f"the script has made a group of {type(optimizer).__name__} fused itself")
                continue
            whole = [parameter for parameter in group["params"] if self._slot_of(parameter) is None]
            why = (None if is_ours else _why_never(optimizer, group, whole)) or _why_not(whole)
            if why is not None:
                self._leave_alone(optimizer, known, place, why)
                continue
            if not is_ours:
                known.words[place] = group.get("fused"), group.get("foreach")
                group.update(fused=True, foreach=False)
            _move_counts(optimizer, group, to_device=True)

    def _leave_alone(self, optimizer: Optimizer, known: _Known, place: int, why: str) -> None:
        group = optimizer.param_groups[place]
        known.alone.add(place)
        if place in known.words:
            _restore(optimizer, group, known.words.pop(place))
        self._tell(f"a group of {type(optimizer).__name__} is not updated by a fused kernel: {why}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note("warning", f"of the plan's fused_updates: {text}")

    # ---- what the script sees ----------------------------------------------------------------

    def _patch(self, undo: Undo) -> None:
        """Inside of what other parts of the engine do to these, which patch them later."""
        original_state, original_load = Optimizer.state_dict, Optimizer.load_state_dict
        this = weakref.ref(self)

        @functools.wraps(original_state)
        def state_dict(optimizer: Optimizer) -> dict[str, Any]:
            result = original_state(optimizer)
            fused = this()
            return result if fused is None else fused._as_the_scripts(optimizer, result)

        @functools.wraps(original_load)
        def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
            original_load(optimizer, state_dict)
            fused = this()
            if fused is not None and fused._known.pop(optimizer, None) is not None:
                fused._fuse(optimizer)  # its groups are those of the state dict

        undo.replace(Optimizer, "state_dict", state_dict)
        undo.replace(Optimizer, "load_state_dict", load_state_dict)

    def _as_the_scripts(self, optimizer: Optimizer, result: dict[str, Any]) -> dict[str, Any]:
        known = self._known.get(optimizer)
        groups = result.get("param_groups", ())
        for place, words in known.words.items() if known is not None else ():
            if place >= len(groups):
                continue
            group = groups[place]
            group.update(zip(_WORDS, words, strict=True))
            for number in group["params"] if not group.get("capturable") else ():
                state = result["state"].get(number)
                if isinstance(state, dict) and isinstance(count := state.get(_COUNT), torch.Tensor):
                    result["state"][number] = {**state, _COUNT: _as_counted_on_host(count)}
        return result

    def _give_back(self) -> None:
        for optimizer, known in list(self._known.items()):
            for place, words in known.words.items():
                if place < len(optimizer.param_groups):
                    _restore(optimizer, optimizer.param_groups[place], words)
        self._known.clear()


def _why_not(parameters: Iterable[torch.Tensor]) -> str | None:
    """Asked before each step: of gradients that may be others in some."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            return "it has sparse gradients"
        if gradient.stride() != parameter.stride():
            return "it has gradients that are not laid out as their parameters"
    return None


def _why_never(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[torch.Tensor]) -> str | None:
    """Asked once, and when states were loaded."""
    if group.get("differentiable"):
        return "it is differentiable"
    if len({getattr(parameter, "device_mesh", None) for parameter in parameters}) > 1:
        return (
            "it has DTensors beside other parameters, or of several meshes, which no operator takes together"
        )
    for parameter in parameters:
        if not (type(parameter) in _TYPES or hasattr(parameter, "device_mesh")):
            return f"it has parameters of the class {type(parameter).__name__}"
        if not parameter.is_floating_point() or parameter.device.type not in _DEVICES:
            return f"it has parameters in {dtype_name(parameter.dtype)} on {parameter.device.type}"
        if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
            return "it has parameters with gaps in memory"
        state = optimizer.state.get(parameter)
        for value in state.values() if isinstance(state, dict) else ():
            is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
            if is_like and value.stride() != parameter.stride():
                return "it has states that are not laid out as their parameters"
    return None


def _restore(optimizer: Optimizer, group: dict[str, Any], words: _Words) -> None:
    """A group is as the script made it, and so are its counts."""
    group.update(zip(_WORDS, words, strict=True))
    _move_counts(optimizer, group, to_device=False)


def _move_counts(optimizer: Optimizer, group: dict[str, Any], *, to_device: bool) -> None:
    """Counts of steps that are made later are where the group's settings say."""
    if not to_device and group.get("capturable"):
        return
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if not isinstance(state, dict) or not isinstance(count := state.get(_COUNT), torch.Tensor):
            continue
        if not to_device:
            state[_COUNT] = _as_counted_on_host(count)
        elif count.device != parameter.device or count.dtype != torch.float32:
            state[_COUNT] = count.to(parameter.device, torch.float32)


def _as_counted_on_host(count: torch.Tensor) -> torch.Tensor:
    """As torch makes one for an update that is not fused (torch.optim.optimizer._get_scalar_dtype)."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return count.to("cpu", dtype)
