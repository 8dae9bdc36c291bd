"""What stands in `parameter.grad` where stages 2 and 3 keep this rank's shard of the gradient alone.

It has the parameter's shape. Reading it asks the other ranks for theirs. What changes it element by element is done on the
shard, with the same elements of whatever else takes part; anything else that changes it is done on the whole gradient, of
which this rank's elements are kept. All ranks do the same, as they do under DistributedDataParallel. A view of it (`grad[:10]`,
`grad.view(-1)`) is one of the whole gradient whenever it is asked for values, and changes reach the shard through it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memadvisor.engines.sharding import gradient_functions
from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.elsewhere import Elsewhere, refused
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class GradientShards:
    """Part of an executor: what its sharded gradients ask for values, and tell of looks and writes."""

    sharded: ShardedModel
    service: AnyService
    early: EarlyUpdates


class _OfGradients(Elsewhere):
    """Of the whole gradient of `base` what `steps` make of it, one after another."""

    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    @property
    def base(self) -> ShardedGradient:
        """The gradient of which this process holds a part."""
        raise NotImplementedError

    def outline(self) -> torch.Tensor:
        """Its form, without values."""
        raise NotImplementedError

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """What it is of the whole gradient."""
        for step in self.steps:
            whole = step(whole)
        return whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types its `func` and `types` loosely
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatched(func, args, kwargs or {})


class ShardedGradient(_OfGradients):
    """A gradient of which this process holds `piece()` only."""

    _slot: weakref.ref[Slot]
    shards: weakref.ref[GradientShards]
    _is_left: bool  # the script has dropped it, and holds it by another name

    @staticmethod
    def __new__(cls, slot: Slot, shards: GradientShards) -> ShardedGradient:
        gradient = torch.Tensor._make_wrapper_subclass(
            cls, slot.shape, strides=slot.stride, dtype=slot.flat.dtype, device=slot.flat.device
        )
        gradient._slot = weakref.ref(slot)
        gradient.shards = weakref.ref(shards)
        gradient._is_left = False
        return gradient

    def __init__(self, slot: Slot, shards: GradientShards) -> None:
        super().__init__()

    @property
    def base(self) -> ShardedGradient:
        return self

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

    def leave(self) -> ShardedGradient:
        """Its values go. Gives what stands for the parameter's next gradient, for which nobody may take it."""
        self._is_left, shards = True, self.shards()
        assert shards is not None
        return ShardedGradient(self.slot, shards)

    def _tell_of_look(self) -> None:
        if self._is_left:
            raise PlanError(
                "The script uses a gradient that no parameter has any more, which a later backward was to find: ZeRO stages 2 "
                "and 3 have its shards no more.",
                hint="keep a copy (p.grad.clone()), or use --zero 1, which keeps whole gradients.",
            )
        slot, shards = self._slot(), self.shards()
        if slot is not None and shards is not None:
            shards.early.look_at_gradient(slot)

    def zero(self) -> None:
        """Zero this rank's elements; what an update in the backward has used up has none."""
        slot, shards = None if self._is_left else self._slot(), self.shards()
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

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own has a private option
        slot = self._slot()
        dropped = slot is None or not slot.flat.has_gradient
        return f"ShardedGradient(shape={tuple(self.shape)})" if dropped else repr(self.full())

    def outline(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def keep(self, full: torch.Tensor) -> None:
        """Whole values that it has from here on."""
        slot = self.slot
        if full.shape != slot.shape:
            raise refused(f"what makes it {tuple(full.shape)}, where it was {tuple(slot.shape)}")
        with slot.flat.changing_gradient() as gradient:
            slot.piece(gradient).copy_(slot.own_elements(full))


class GradientView(_OfGradients):
    """A view of a gradient of which this process holds a part: of the whole one, whenever it is asked."""

    _gradient: ShardedGradient
    _outline: torch.Tensor

    @staticmethod
    def __new__(
        cls,
        base: ShardedGradient,
        steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...],
        outline: torch.Tensor,
    ) -> GradientView:
        view = torch.Tensor._make_wrapper_subclass(
            cls,
            outline.shape,
            strides=outline.stride(),
            storage_offset=outline.storage_offset(),
            dtype=outline.dtype,
            device=base.device,
        )
        view._gradient, view.steps, view._outline = base, steps, outline
        return view

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def base(self) -> ShardedGradient:
        return self._gradient

    def full(self) -> torch.Tensor:
        return self.of(self.base.full())

    def outline(self) -> torch.Tensor:
        return self._outline


def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is _aten.detach:
        return args[0]
    gradients = _gradients_in(args[0]) if args else []
    is_known = func.overloadpacket in _ELEMENTWISE and gradients and not _has_views(args[0])
    if is_known and _only_first(args[1:], kwargs):
        with _changing(gradients):
            for some in _by_flat(func, args):
                _write_pieces(func, some, kwargs)
        return args[0] if func._schema.returns else None
    if gradient_functions.is_writing_collective(func):
        raise refused(func.overloadpacket.__name__)
    written = gradient_functions.written(func, args, kwargs, _OfGradients)
    if written:
        if torch.Tag.inplace_view in func.tags:
            raise refused(func.overloadpacket.__name__)
        # A gradient of no dimension is a piece of one: which numbers count for the dtype would be another matter.
        in_pieces = not _has_views(written) and all(tensor.dim() > 0 for tensor in written)
        is_elementwise = in_pieces and gradient_functions.is_elementwise(func)
        return (_write_elements if is_elementwise else _write_wholes)(func, args, kwargs, written)
    if gradient_functions.gives_views(func) and isinstance(args[0], _OfGradients):
        return _views(func, args[0], args[1:], kwargs)
    full = tree_map_only(Elsewhere, lambda tensor: tensor.full(), (args, kwargs))
    return func(*full[0], **full[1])


def _views(func: Any, first: _OfGradients, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    outlines, base, steps = func(first.outline(), *rest, **kwargs), first.base, first.steps
    if isinstance(outlines, torch.Tensor):
        return GradientView(base, (*steps, lambda whole: func(whole, *rest, **kwargs)), outlines)
    return [
        GradientView(base, (*steps, lambda whole, index=index: func(whole, *rest, **kwargs)[index]), outline)
        for index, outline in enumerate(outlines)
    ]


@contextlib.contextmanager
def _changing(gradients: list[ShardedGradient]) -> Iterator[None]:
    """Around the change of them: every rank has read what was there before, and who asks from here on waits for it."""
    models = {id(shards): shards for gradient in gradients if (shards := gradient.shards()) is not None}
    for shards in models.values():
        shards.sharded.meet_before_writes(shards.service.all_have_read)
    yield
    for shards in models.values():
        shards.sharded.num_writes += 1


def _write_wholes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[_OfGradients]
) -> Any:
    """On whole gradients, of which this rank keeps its elements."""
    wholes: dict[int, torch.Tensor] = {}
    given: dict[int, _OfGradients] = {}

    def whole(tensor: _OfGradients) -> torch.Tensor:
        base = tensor.base
        if id(base) not in wholes:
            wholes[id(base)] = base.full()
        found = tensor.of(wholes[id(base)])
        given[id(found)] = tensor
        return found

    mapped = tree_map_only(_OfGradients, whole, (args, kwargs))
    result = func(*mapped[0], **mapped[1])
    bases = list({id(tensor.base): tensor.base for tensor in written}.values())
    with _changing(bases):
        for base in bases:
            base.keep(wholes[id(base)])
    return tree_map_only(torch.Tensor, lambda tensor: given.get(id(tensor), tensor), result)


def _write_elements(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[_OfGradients]
) -> Any:
    """On this rank's elements of all that takes part."""
    gradients = [tensor for tensor in written if isinstance(tensor, ShardedGradient)]
    is_list = isinstance(args[0], (list, tuple))
    targets = list(args[0]) if is_list else [gradients[0]]

    def elements(value: Any, target: Any) -> Any:
        if not isinstance(value, torch.Tensor) or (isinstance(value, ShardedGradient) and value is target):
            return value
        if isinstance(value, Elsewhere):
            value = value.full()
        if not isinstance(target, ShardedGradient) or value.dim() == 0:
            return value
        return target.slot.own_elements(value.expand(target.shape))

    def of_all(value: Any) -> Any:
        if is_list and isinstance(value, (list, tuple)):
            return [elements(one, target) for one, target in zip(value, targets, strict=True)]
        return elements(value, targets[0])

    rest = [of_all(value) for value in args]
    named = {name: of_all(value) for name, value in kwargs.items()}
    with _changing(gradients), contextlib.ExitStack() as stack:
        for flat in {id(g.slot.flat): g.slot.flat for g in gradients}.values():
            stack.enter_context(flat.changing_gradient())
        pieces = tree_map_only(ShardedGradient, ShardedGradient.piece, (rest, named))
        func(*pieces[0], **pieces[1])
    return gradients[0] if func._schema.returns else None


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


def _gradients_in(value: Any) -> list[ShardedGradient]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [tensor for tensor in values if isinstance(tensor, ShardedGradient)]


def _has_views(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(tensor, GradientView) for tensor in values)


def _only_first(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the other operands are plain numbers, or tensors of one number."""
    found: list[bool] = []

    def note(tensor: torch.Tensor) -> None:
        found.append(tensor.dim() == 0 and not isinstance(tensor, Elsewhere))

    tree_map_only(torch.Tensor, note, (rest, kwargs))
    return all(found)
