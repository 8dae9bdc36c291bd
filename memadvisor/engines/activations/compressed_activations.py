"""Units whose saved tensors are rounded to a few bits from the moment they are saved until the backward asks for them.

As with recomputation the forward of a unit's class is wrapped, not the module, and what autograd saves in it passes
through hooks (saved_activations.py says what stays in any case). Of the rest,

- what carries a gradient is rounded (rounded.py): it is a value, of which the backward makes linear use, or the slope of
  something smooth. A ReLU's result keeps for each element whether it is positive;
- what needs none is a mask, an index or a statistic (a norm's mean, attention's sums): booleans and what holds two
  values alone are kept as one bit an element, exactly, all else as it is;
- as they are stay also: what is made of parameters alone (a weight as autocast has cast it), what is small beside the
  unit's input, and what has an infinity in it or is no number.

The copy is made when a storage is first saved, so that the forward itself may let go of the original; all its views share
it. What somebody else has kept, be it the original or an earlier call for the same storage, is used as it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memadvisor.activation_bits import FLOATING, MASK_BITS, STATISTIC_SHARE
from memadvisor.engines.activations.rounded import Noise, packed_mask, restore, rounded
from memadvisor.engines.activations.saved_activations import Held, Record, SavedActivations, stays
from memadvisor.engines.activations.unit_forwards import UnitForwards, is_to_be_saved, obstacles
from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.undo import Undo
from memadvisor.schedule import Schedule

Note = Callable[[str, str], None]
Label = Callable[[torch.Tensor, str, str], None]

_SEED = 20210429
_DTYPES = tuple(getattr(torch, name) for name in FLOATING)
# Backward nodes that are followed from a saved tensor on, to find out whether it is made of parameters alone.
_MOST_NODES = 8


class Rounded:
    """One storage in fewer bits. Autograd's places hold it; who asks for it gets the original while that is alive."""

    __slots__ = (
        "__weakref__",
        "_bits",
        "_dtype",
        "_is_relu",
        "_label",
        "_num_elements",
        "_original",
        "_restored",
        "packed",
        "version",
    )

    def __init__(self, values: torch.Tensor, packed: torch.Tensor, bits: int, *, is_relu: bool) -> None:
        self.packed = packed
        self.version = 0
        self._bits = bits
        self._is_relu = is_relu
        self._dtype, self._num_elements = values.dtype, values.numel()
        # Until it goes, no other storage has the original's identity.
        self._original: Any = StorageWeakRef(values.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types for it
        self._restored: Any = None
        self._label: Callable[[torch.Tensor], None] = lambda tensor: None

    def recorded(self, record: Record, tensor: torch.Tensor) -> Held | None:
        return record.keep(tensor, self.packed)

    def here(self) -> torch.UntypedStorage:
        for reference in (self._original, self._restored):
            if reference is not None:
                storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
                if storage is not None:
                    return storage  # type: ignore[no-any-return]  # torch has no types for it
        with torch.no_grad():
            values = torch.empty(self._num_elements, dtype=self._dtype, device=self.packed.device)
            self._label(values)
            restore(self.packed, values, self._bits, is_relu=self._is_relu)
        restored = values.untyped_storage()
        self._restored = StorageWeakRef(restored)  # type: ignore[no-untyped-call]  # torch has no types for it
        return restored


class _Call:
    """One call of a unit's forward."""

    def __init__(self, owner: CompressedActivations, unit: str, bits: int, arguments: Any) -> None:
        self._owner = owner
        self._unit = unit
        self._bits = bits
        leaves: list[Any] = tree_leaves(arguments)
        sizes = [
            leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        ]
        self._fewest_elements = max(sizes, default=0) // STATISTIC_SHARE

    def found(self, tensor: torch.Tensor) -> Rounded | None:
        storage = tensor.untyped_storage()
        known = self._owner.known.get(storage._cdata)
        if known is not None and known.version == tensor._version and known._dtype == tensor.dtype:
            return known
        values = _elements(tensor, storage)
        if values is None:
            return None
        with torch.no_grad():
            made = self._round(tensor, values)
        if made is not None:
            made.version = tensor._version
            self._owner.keep(made, storage, self._unit)
        return made

    def _round(self, tensor: torch.Tensor, values: torch.Tensor) -> Rounded | None:
        packed: torch.Tensor | None
        if not tensor.requires_grad:
            packed = packed_mask(values) if tensor.dtype == torch.bool or tensor.dtype in _DTYPES else None
            return None if packed is None else Rounded(values, packed, MASK_BITS, is_relu=False)
        if tensor.dtype not in _DTYPES or values.numel() < self._fewest_elements:
            return None
        if _is_of_parameters(tensor):
            return None
        is_relu = tensor.grad_fn is not None and tensor.grad_fn.name() == "ReluBackward0"
        packed = rounded(values, self._bits, self._owner.noise_of(values.device), is_relu=is_relu)
        return None if packed is None else Rounded(values, packed, self._bits, is_relu=is_relu)

    def brings(self, stored: Rounded) -> None:
        """Nothing is to be begun: it is brought back where it is asked for."""


class CompressedActivations:
    """All units of a process whose activations are rounded. Modules are held weakly."""

    def __init__(self, hooks: Hooks, label: Label, note: Note, undo: Undo) -> None:
        self._hooks = hooks
        self._label = label
        self._note = note
        self._units: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._forwards = UnitForwards(self, undo)
        self._noise: dict[torch.device, Noise] = {}
        self.known: weakref.WeakValueDictionary[int, Rounded] = weakref.WeakValueDictionary()
        undo.add(self._units.clear)

    def attach(self, model: LiveModel, schedule: Schedule) -> None:
        """Round what units of a schedule keep that have `activation_bits`."""
        bits = {unit.name: unit.activation_bits for unit in schedule.units}
        alone = obstacles(model)
        for unit in model.units:
            chosen = bits.get(unit.name)
            if chosen is None:
                continue
            if unit.name in alone:
                self._note("warning", f"what unit {unit.name!r} keeps is not rounded: {alone[unit.name]}")
                continue
            self._units[unit.module] = (unit.name, chosen)
            self._forwards.wrap(unit.module)

    def noise_of(self, device: torch.device) -> Noise:
        if device not in self._noise:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._noise[device] = Noise(device, _SEED + rank)
        return self._noise[device]

    def keep(self, made: Rounded, storage: torch.UntypedStorage, unit: str) -> None:
        """Let other views of the storage find it, and tell what its bytes are."""
        label = self._label
        made._label = lambda tensor: label(tensor, "activation", unit)
        made._label(made.packed)
        self.known[storage._cdata] = made

    def applies(self, module: torch.nn.Module) -> bool:
        if module not in self._units or not is_to_be_saved(self._hooks, "rounded"):
            return False
        autograd: Any = torch._C._autograd
        return bool(autograd._saved_tensors_hooks_is_enabled())

    def run(self, original: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        unit, bits = self._units[module]
        call = _Call(self, unit, bits, (args, kwargs))
        with SavedActivations(call, stays(module, (args, kwargs))):
            return original(module, *args, **kwargs)


def _elements(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor | None:
    """All that is in a tensor's storage, as numbers of its kind; None where they do not fill it."""
    if storage.nbytes() % tensor.element_size():
        return None
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)


def _is_of_parameters(tensor: torch.Tensor) -> bool:
    """Whether a tensor is computed from parameters and nothing else, in a few operators."""
    nodes: list[Any] = [tensor.grad_fn]
    for _ in range(_MOST_NODES):
        node = nodes.pop()
        if node is None or node.name() == "EmbeddingBackward0":
            return False  # there is something in it that needs no gradient, as data do
        leaf = getattr(node, "variable", None)
        if leaf is None:
            nodes += [parent for parent, _ in node.next_functions]
        elif not isinstance(leaf, torch.nn.Parameter):
            return False
        if not nodes:
            return True
    return False
