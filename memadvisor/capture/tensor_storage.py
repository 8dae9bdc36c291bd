"""What a tensor's storage is: its address, whose memory it is, and which tensors stand behind a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch

from memadvisor.run.torch_names import dtype_name

PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
# Exact types of arguments that hold no tensor.
NO_TENSORS = frozenset(
    (int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)


# Address of a tensor's storage, without a Python object of the storage, which takes five times as long to make; 0 where
# there is no memory. Unlike `storage.data_ptr()` it makes no copy of what is shared until it is written.
data_address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storage behind a tensor: itself, or what a subclass (DTensor, a quantised one) wraps."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten(tensor)[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # DTensor names its mesh too
            yield from plain_tensors(part)


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold a sparse one, whose own storage is none: its values and where they stand."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def storage_address(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage, 0 where it has none (meta, fake, sparse, wrapper subclasses)."""
    try:
        if type(tensor) in PLAIN_TENSORS:
            return data_address(tensor)
        if type(tensor).__name__ == "FakeTensor":
            return 0
        # A subclass may do anything when it is asked something: an engine's would bring its values here.
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def has_wrapper(types: Iterable[type]) -> bool:
    """Whether tensors that wrap others (DTensor, a quantised one) are among the arguments.

    A dispatch mode then returns NotImplemented: they run operators on what they wrap, which it sees.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other processes share its memory, which then is not the CPU allocator's; CUDA's always may be."""
    return tensor.device.type == "cpu" and bool(tensor.untyped_storage().is_shared())


def describe(tensor: torch.Tensor) -> tuple[str, str]:
    """(dtype, shape) as the run records them; a nested tensor of strided ones has no shape."""
    return dtype_name(tensor.dtype), "" if is_without_shape(tensor) else str(list(tensor.shape))


def is_without_shape(tensor: torch.Tensor) -> bool:
    return tensor.is_nested and tensor.layout is torch.strided


def tensors_in(values: Any) -> Iterable[torch.Tensor]:
    """Tensors among an operator's arguments or results: flat, or in lists one or two levels deep."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is in this device's memory; where the device has no number, in that of any of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def presence(device: torch.device) -> Callable[[torch.Tensor], bool] | None:
    """Whether a tensor is on the device; None where all tensors with memory are in the host's."""
    if torch.accelerator.current_accelerator() is None:
        return None
    if device.type == "cpu" or torch.accelerator.device_count() == 1:
        return attrgetter(f"is_{device.type}")
    return lambda tensor: is_on(tensor, device)
