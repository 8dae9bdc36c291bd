"""Tensors of a state dict whose values lie on several ranks: brought here when they are read, not before.

`model.state_dict()` under stage 3 and `optimizer.state_dict()` under stages 1 to 3 name tensors that no rank has
whole. What the script does with one of them is done on whole values, which a rank asks for then and lets go of
afterwards; `torch.save` asks when it writes a tensor's bytes, and torch.distributed.checkpoint has each rank
write what it holds (checkpoints.py). A tensor whose address the script looks at, or that it writes into, becomes a
plain one there and then: from that moment it is the copy that the script would otherwise have had from the start.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memadvisor.engines.sharding.tensor_functions import is_writing, name_of, needs_no_values

_aten = torch.ops.aten
# What tells where the values are, or makes a parameter of the tensor: from here on they have to stay.
_REVEALS = {
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "is_set_to", "share_memory_", "is_shared"),
    *("__cuda_array_interface__", "requires_grad_", "_cdata"),
}


class Source(Protocol):
    """What a late tensor stands for, and asks for values: of shards (sources.py), or on another tier (parcels.py).

    is_part: whether it is made for a checkpoint that writes it now, and for nobody else.
    """

    @property
    def shape(self) -> torch.Size: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def is_part(self) -> bool: ...
    @property
    def kept(self) -> torch.Tensor | None:
        """Whole values that stay, once somebody needs them to."""

    def values(self) -> torch.Tensor:
        """Whole values, in the tensor's shape; the memory may be lent."""

    def keep(self) -> torch.Tensor:
        """Whole values, which stay from here on."""

    def copy(self) -> torch.Tensor:
        """Whole values in memory of their own, 1-D in storage order."""

    def is_live(self, slot: Any, key: str) -> bool:
        """Whether this is what a parameter has now, or under `key` its optimizer keeps for it now."""


class LateTensor(torch.Tensor):
    """See the top of this file."""

    source: Any  # a Source; what a checkpoint is given has `part`, `write_items` and `chunks_to_read` too

    @staticmethod
    def __new__(cls, source: Source) -> LateTensor:
        late = torch.Tensor._make_wrapper_subclass(
            cls, source.shape, strides=source.stride, dtype=source.dtype, device=source.device
        )
        late.source = source
        return late

    def __init__(self, source: Source) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if type(first) is LateTensor:
                name = name_of(func)
                if _changes_nothing(name, first, args[1:], kwargs):
                    return first
                if name == "untyped_storage" and first.source.is_part:
                    return _LateBytes(first.source)
                if name in _REVEALS or is_writing(func):
                    first._become_plain()
                elif needs_no_values(func):
                    return func(*args, **kwargs)
            args, kwargs = tree_map(_plain, args), tree_map(_plain, kwargs)
        return func(*args, **kwargs)  # by the classes of others, parameters of stage 3 among them

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types its `func` and `types` loosely
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is _aten.detach:
            return args[0]
        if func._schema.is_mutable:
            leaves: list[Any] = tree_leaves((args, kwargs))
            for value in leaves:
                if type(value) is LateTensor:
                    value.source.keep()
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))

    def _become_plain(self) -> None:
        """Be an ordinary tensor from here on, in the very object that the script has."""
        plain = self.source.keep().detach()
        torch.utils.swap_tensors(self, plain.view_as(plain))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        source = self.source
        if id(source) not in memo:  # tied tensors have one source, and their copies share too
            memo[id(source)] = source, source.copy()
        copied: torch.Tensor = memo[id(source)][1].as_strided(source.shape, source.stride)
        return copied

    # ---- torch.save and pickle ---------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        storage = _LateStorage(self.source)
        parts: Any = (storage, 0, tuple(self.source.shape), self.source.stride, False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, parts

    # ---- torch.distributed.checkpoint --------------------------------------------------------

    def __create_write_items__(self, fqn: str, tensor: Any) -> Any:
        return self.source.write_items(fqn)

    def __create_chunk_list__(self) -> Any:
        chunks = self.source.chunks_to_read()
        if not self.source.is_shared_out:
            self._become_plain()  # what is read is written into it
        return chunks

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        part: torch.Tensor = self.source.part(index.offset)
        return part


def _plain(value: Any) -> Any:
    return value.source.values() if type(value) is LateTensor else value


def _changes_nothing(name: str, late: LateTensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result would be the tensor itself, or another view of the same memory."""
    if name in ("detach", "data"):
        return True
    if name == "cpu":
        return late.device.type == "cpu"
    if name == "contiguous":
        return late.is_contiguous() and not rest and not kwargs
    if name != "to" or not all(isinstance(value, _OF_TO) for value in (*rest, *kwargs.values())):
        return False
    device, dtype, *_ = torch._C._nn._parse_to(*rest, **kwargs)
    return device in (None, late.device) and dtype in (None, late.dtype)


_OF_TO = (torch.dtype, torch.device, str)


# ---- what torch.save meets -----------------------------------------------------------------------


class _LateBytes:
    """What torch.save takes for the memory of a tensor on another device, which it copies when it writes it.

    It collects the storages of all tensors first, writes one after another, and calls `cpu` on those that are not on
    the host: so one tensor is in memory at a time.
    """

    device = SimpleNamespace(type="memadvisor", index=None)

    def __init__(self, source: Source) -> None:
        self.source = source
        self._cdata = id(source)  # torch tells storages apart by it

    def data_ptr(self) -> int:
        return 0  # for "none"

    def nbytes(self) -> int:
        return math.prod(self.source.shape) * self.source.dtype.itemsize

    size = nbytes

    def cpu(self) -> torch.UntypedStorage:
        return self.source.copy().cpu().untyped_storage()

    def _write_file(self, *args: Any) -> None:
        """For torch's older format."""
        storage: Any = self.cpu()
        storage._write_file(*args)


class _LateStorage(torch.storage.TypedStorage):
    """A storage that torch.save recognises; any other pickler is given the bytes."""

    def __new__(cls, source: Source) -> _LateStorage:
        return object.__new__(cls)

    def __init__(self, source: Source) -> None:
        self._untyped_storage: Any = _LateBytes(source)
        self.dtype = source.dtype

    def __reduce__(self) -> Any:
        kind: Any = torch.storage.TypedStorage
        return kind(wrap_storage=self._untyped_storage.cpu(), dtype=self.dtype, _internal=True).__reduce__()


def _tag(storage: Any) -> str | None:
    """Where a tensor is loaded to: the device that it would have been saved from."""
    if not isinstance(storage, _LateBytes):
        return None
    there: str = torch.serialization.location_tag(
        torch.empty(0, device=storage.source.device).untyped_storage()
    )
    return there


torch.serialization.register_package(7, _tag, lambda storage, location: None)
