"""What stands in `parameter.grad` where stages 2 and 3 keep this rank's shard of the gradient alone.

It has the parameter's shape. Scaling and zeroing in place are done on the shard; reading it asks the
other ranks for theirs. Anything else that writes into it is refused: it could not be kept.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.flat import Flat, Slot
from memadvisor.engines.sharding.service import AnyService
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.errors import PlanError

_aten = torch.ops.aten
_ZEROING = {_aten.zero_, _aten._foreach_zero_}
# Elementwise, in place, with numbers that are the same on every rank: right on every shard by itself.
_ELEMENTWISE = {
    *(_aten.zero_, _aten.mul_, _aten.div_, _aten.clamp_, _aten.clamp_min_, _aten.clamp_max_, _aten.fill_),
    *(_aten._foreach_zero_, _aten._foreach_mul_, _aten._foreach_div_),
    *(_aten._foreach_clamp_min_, _aten._foreach_clamp_max_, _aten.nan_to_num_),
}
# Collectives that write into what they are given; torch does not say so of them.
_WRITING_COLLECTIVES = {
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "recv_",
    "recv_any_source_",
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class GradientShards:
    """Part of an executor: what its sharded gradients ask for values, and tell of looks and writes."""

    sharded: ShardedModel
    service: AnyService
    early: EarlyUpdates


class ShardedGradient(torch.Tensor):
    """A gradient of which this process holds `piece()` only."""

    _slot: weakref.ref[Slot]
    shards: weakref.ref[GradientShards]

    @staticmethod
    def __new__(cls, slot: Slot, shards: GradientShards) -> ShardedGradient:
        gradient = torch.Tensor._make_wrapper_subclass(
            cls, slot.shape, strides=slot.stride, dtype=slot.flat.dtype, device=slot.flat.device
        )
        gradient._slot = weakref.ref(slot)
        gradient.shards = weakref.ref(shards)
        return gradient

    def __init__(self, slot: Slot, shards: GradientShards) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def piece(self) -> torch.Tensor:
        """This rank's elements, 1-D."""
        slot = self._slot()
        self._tell_of_look()
        if slot is None or (gradient := slot.flat.grad_shard) is None:
            raise RuntimeError("this gradient has been dropped")
        return slot.piece(gradient)

    @property
    def slot(self) -> Slot:
        """Whose gradient it is."""
        slot = self._slot()
        if slot is None:
            raise RuntimeError("this gradient has been dropped")
        return slot

    @property
    def paged_flat(self) -> Flat | None:
        """The flat that it is part of, where that lies on another tier."""
        slot = self._slot()
        return None if slot is None or slot.flat.page is None else slot.flat

    def _tell_of_look(self) -> None:
        slot, shards = self._slot(), self.shards()
        if slot is not None and shards is not None:
            shards.early.look_at_gradient(slot)

    def zero(self) -> None:
        """Zero this rank's elements; what an update in the backward has used up has none."""
        slot, shards = self._slot(), self.shards()
        if slot is not None and shards is not None:
            shards.early.zero_gradient(slot)
            if slot.flat.has_gradient:
                with slot.flat.changing_gradient() as gradient:
                    slot.piece(gradient).zero_()

    def full(self) -> torch.Tensor:
        """The whole mean gradient, in the parameter's shape; the other ranks need not take part."""
        self._tell_of_look()
        slot, shards = self._slot(), self.shards()
        if slot is None or shards is None:
            raise RuntimeError("this gradient has been dropped")
        full = slot.flat.new(slot.flat.padded_numel)
        shards.sharded.has_read_gradients()
        shards.service.fetch_gradients(slot.flat, full)
        return slot.view(full).clone()

    # What torch does without its dispatcher, on memory that is not here: each on whole values.

    def numpy(self, *, force: bool = False) -> Any:
        """Whole values; writing into them changes nothing."""
        return self.full().numpy(force=force)

    def tolist(self) -> Any:
        """Whole values."""
        return self.full().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self.full().__array__(dtype)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        return self.full().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.full())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own has a private option
        slot = self._slot()
        dropped = slot is None or not slot.flat.has_gradient
        return f"ShardedGradient(shape={tuple(self.shape)})" if dropped else repr(self.full())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types its `func` and `types` loosely
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is _aten.detach:
            return args[0]
        if func.overloadpacket in _ELEMENTWISE and _only_first(args[1:], kwargs):
            models = _shards_of(args)
            for shards in models:
                shards.sharded.meet_before_writes(shards.service.all_have_read)
            for some in _by_flat(func, args):
                _write_pieces(func, some, kwargs)
            for shards in models:
                shards.sharded.num_writes += 1  # who asks for gradients from here on waits for this write
            return args[0]
        name = func.overloadpacket.__name__
        is_collective = func.namespace == "c10d" and name in _WRITING_COLLECTIVES
        if is_collective or (func._schema.is_mutable and _writes_gradient(func, args)):
            raise PlanError(
                f"The script changes gradients by {name}, which cannot be done on the "
                "shards that ZeRO stages 2 and 3 keep.",
                hint="use --zero 1, which keeps whole gradients.",
            )
        full = tree_map_only(ShardedGradient, ShardedGradient.full, (args, kwargs))
        return func(*full[0], **full[1])


def _by_flat(func: Any, args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Arguments for one call after another that do together what one does: of gradients that lie elsewhere, those of one
    flat at a time are in memory."""
    first, is_alike = args[0], func._overloadname in ("default", "Scalar", "Tensor")
    if not isinstance(first, (list, tuple)) or not is_alike:
        return [args]
    flats = [gradient.paged_flat if isinstance(gradient, ShardedGradient) else None for gradient in first]
    return [
        ([one for one, _ in group], *args[1:])
        for _, group in itertools.groupby(zip(first, flats, strict=True), key=lambda pair: id(pair[1]))
    ]


def _write_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do to this process's pieces what is asked of the gradients."""
    paged: dict[int, Flat] = {}

    def note(gradient: ShardedGradient) -> None:
        flat = gradient.paged_flat
        if flat is not None and flat.has_gradient:
            paged[id(flat)] = flat

    tree_map_only(ShardedGradient, note, args)
    with contextlib.ExitStack() as stack:
        for flat in paged.values():
            stack.enter_context(flat.changing_gradient())
        if func.overloadpacket in _ZEROING:
            tree_map_only(ShardedGradient, ShardedGradient.zero, args)
            return
        func(*tree_map_only(ShardedGradient, ShardedGradient.piece, args), **kwargs)


def _shards_of(args: tuple[Any, ...]) -> list[GradientShards]:
    """Those of the models whose gradients these are."""
    found: dict[int, GradientShards] = {}

    def note(gradient: ShardedGradient) -> None:
        shards = gradient.shards()
        if shards is not None:
            found[id(shards)] = shards

    tree_map_only(ShardedGradient, note, args)
    return list(found.values())


def _only_first(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the other operands are plain numbers, or tensors of one number."""
    found: list[bool] = []
    tree_map_only(torch.Tensor, lambda tensor: found.append(tensor.dim() == 0), (rest, kwargs))
    return all(found)


def _writes_gradient(func: Any, args: tuple[Any, ...]) -> bool:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found: list[Any] = []
            tree_map_only(ShardedGradient, found.append, value)
            if found:
                return True
    return False
