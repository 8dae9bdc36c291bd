"""What autograd keeps of a stage-3 parameter: its place, not its values.

A weight saved for the backward is a view of storage that is released after the forward. While a unit's
forward runs, such tensors are packed as their place in the flat, and unpacked by gathering it on demand.
All other tensors go to the hooks that were there before: the script's own, a checkpoint's, a recorder's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.gathers import Gathers

Pack = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class _Place:
    flat: Flat
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    collective: bool
    num_steps: int


class SavedParameters:
    """One pair of saved-tensor hooks for one executor, which they do not keep alive."""

    def __init__(self, gathers: Gathers, outer: tuple[Pack, Callable[[Any], Any]] | None) -> None:
        self._gathers = weakref.ref(gathers)
        self._outer = outer
        self._by_storage = {
            flat.full.untyped_storage()._cdata: flat
            for flat in gathers.sharded.flats
            if flat.stage == 3 and flat.full is not None
        }

    @staticmethod
    def push(gathers: Gathers) -> int:
        """Install the hooks unless they are the innermost ones already; returns how many were pushed."""
        outer = top_hooks()
        if outer is not None and getattr(outer[0], "__func__", None) is SavedParameters.pack:
            return 0
        hooks = SavedParameters(gathers, outer)
        torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
        return 1

    @staticmethod
    def pop() -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: torch.Tensor) -> Any:
        gathers = self._gathers()
        flat = self._by_storage.get(storage_id(tensor))
        if flat is None or gathers is None:
            return self._outer[0](tensor) if self._outer is not None else tensor
        return _Place(
            flat,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            gathers.sharded.collective,
            gathers.sharded.num_steps,
        )

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Place):
            return self._outer[1](packed) if self._outer is not None else packed
        gathers = self._gathers()
        if gathers is None or packed.flat.full is None:
            raise RuntimeError("the model of this graph is gone")
        if packed.num_steps != gathers.sharded.num_steps:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation: a parameter was updated by the optimizer after this forward."
            )
        gathers.gather(packed.flat, packed.collective)
        return packed.flat.full.as_strided(packed.size, packed.stride, packed.offset)


def top_hooks() -> tuple[Pack, Callable[[Any], Any]] | None:
    """The saved-tensor hooks in force, of whoever pushed them last."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top if top is None or top[0] is not None else None


def innermost_gathers() -> weakref.ref[Gathers] | None:
    """Of the hooks in force, if these are a SavedParameters'."""
    owner = getattr((top_hooks() or (None,))[0], "__self__", None)
    return owner._gathers if isinstance(owner, SavedParameters) else None


@contextlib.contextmanager
def parameters_apart(reference: weakref.ref[Gathers] | None) -> Iterator[None]:
    """What autograd keeps of these parameters is not seen by hooks that have been installed since: it is a place."""
    gathers = None if reference is None else reference()
    pushed = 0 if gathers is None else SavedParameters.push(gathers)
    try:
        yield
    finally:
        if pushed:
            SavedParameters.pop()


def storage_id(tensor: torch.Tensor) -> int:
    """What tells a tensor's storage from all others alive; 0 where it has none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def is_in_checkpoint() -> bool:
    """Whether what is saved now is saved by a checkpoint of the script's, in whose forward ours may be the innermost
    hooks."""
    top = top_hooks()
    return getattr(innermost_foreign(top and top[0]), "__module__", None) == "torch.utils.checkpoint"


def innermost_foreign(pack: Any) -> Any:
    """The saved-tensor hook of the script's under ours, if ours is the innermost."""
    while True:
        owner = getattr(pack, "__self__", None)
        outer = getattr(owner, "_outer", None)
        if type(owner).__name__ not in ("SavedParameters", "SavedActivations"):
            return pack
        pack = outer[0] if outer is not None else None
