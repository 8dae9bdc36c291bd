"""`--memory-limit`: every operator watched, every storage labelled, and an error where the limit is passed.

On a CPU the tool imposes the limit itself: after each operator that made the allocator's total grow past it,
torch.OutOfMemoryError is raised, as a device's allocator would have raised it in the operator. What an operator
takes and gives back inside itself is not seen. On CUDA the caching allocator imposes the limit, and this only
labels. Operators of other threads are not watched, though what they hold counts at the next one that is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _pop_saved_tensors_default_hooks, _push_saved_tensors_default_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memadvisor.capture.cpu_account import CpuAccount
from memadvisor.capture.operator_kinds import NAMESPACES_OF_COLLECTIVES
from memadvisor.capture.own_mode import OwnMode
from memadvisor.capture.position import Position
from memadvisor.capture.saved_hooks import without_cycle
from memadvisor.capture.tensor_storage import describe, has_wrapper, storage_address, tensors_in
from memadvisor.never_compiled import never_compiled_itself
from memadvisor.own_hooks import own_hooks_aside, unseen_by_checkpoints
from memadvisor.units import format_bytes

REFUSED = "memadvisor's --memory-limit"  # in the message of every error that is raised here


@dataclass(slots=True, eq=False)
class LiveBlock:
    """A storage that an operator made, and where. `role` is what is known of its use, "" nothing."""

    storage: weakref.ref[Any]
    device: torch.device
    address: int
    module: str
    unit: str
    phase: str
    operator: str
    dtype: str
    shape: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An operator that took more than the limit leaves. Totals are those before it."""

    operator: str
    requested_bytes: int
    allocated_bytes: int


class MemoryWatch(OwnMode):
    """Watches this thread's operators from `start` to `stop`. `cpu` None: it imposes no limit, and only labels.

    `on_refusal` is told before the error is raised, `fail` of what of ours raises, and the operator runs all the same.
    """

    def __init__(
        self,
        position: Position,
        limit_bytes: int,
        on_refusal: Callable[[Refusal], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.cpu: CpuAccount | None = None
        self._position = position
        self._on_refusal = on_refusal
        self._fail = fail
        self._blocks: dict[int, LiveBlock] = {}  # by the storage's identity
        self._pid = os.getpid()
        self._is_active = False

    def start(self) -> None:
        self._is_active = True
        self.__enter__()
        self._seen_again = unseen_by_checkpoints()
        _push_saved_tensors_default_hooks(self._pack, _same)

    def stop(self) -> None:
        """Leave; where the script has a mode of its own on top of this one, it stays and does nothing."""
        self._is_active = False
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
            _pop_saved_tensors_default_hooks()
            self._seen_again()
        self._blocks.clear()

    @never_compiled_itself
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._is_active or self._pid != os.getpid():
            return func(*args, **(kwargs or {}))
        if has_wrapper(types):
            return NotImplemented
        before_bytes = self.cpu.allocated_bytes() if self.cpu is not None else 0
        if func.namespace in NAMESPACES_OF_COLLECTIVES:
            with own_hooks_aside():
                out = func(*args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        try:
            for tensor in tensors_in(out):
                self._meet(tensor, func)
        except Exception as error:
            self._is_active = False
            self._fail(error)
            return out
        if self.cpu is not None and self.cpu.allocated_bytes() > max(before_bytes, self.limit_bytes):
            taken_bytes = self.cpu.allocated_bytes() - before_bytes
            # The traceback holds this frame, and must not keep what the operator took.
            out = args = kwargs = tensor = None  # type: ignore[assignment]
            self._refuse(func._schema.name, taken_bytes, before_bytes)
        return out

    def note_inputs(self, values: Iterable[Any]) -> None:
        """What a model is called with."""
        for tensor in tensors_in(tuple(values)):
            self._mark(tensor, "input")

    def blocks(self, device: torch.device) -> Iterator[tuple[LiveBlock, int]]:
        """The storages that are alive on a device, each with its bytes."""
        for block in list(self._blocks.values()):
            storage = block.storage()
            if storage is not None and block.device == device and storage.resizable():
                yield block, storage.nbytes()

    def _refuse(self, operator: str, taken_bytes: int, before_bytes: int) -> None:
        self._on_refusal(Refusal(operator, taken_bytes, before_bytes))
        free = format_bytes(max(0, self.limit_bytes - before_bytes))
        raise torch.OutOfMemoryError(
            f"CPU out of memory. Tried to allocate {format_bytes(taken_bytes)}. {REFUSED} gives this "
            f"process {format_bytes(self.limit_bytes)}, of which {free} is free; torch has allocated "
            f"{format_bytes(before_bytes)}."
        )

    def _meet(self, tensor: torch.Tensor, func: Any) -> None:
        if type(tensor).__name__ == "FakeTensor" or tensor.layout != torch.strided:
            return
        address = storage_address(tensor)
        if not address:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._blocks.get(key)
        if known is not None:
            known.address = address
            return
        position, blocks = self._position, self._blocks

        def forget(_: object) -> None:
            blocks.pop(key, None)

        blocks[key] = LiveBlock(
            weakref.ref(storage, forget), tensor.device, address, position.module, position.unit, position.phase,
            func._schema.name, *describe(tensor),
            role="communication" if func.namespace in NAMESPACES_OF_COLLECTIVES else "",
        )  # fmt: skip

    def _mark(self, tensor: torch.Tensor, role: str) -> None:
        try:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # a tensor without a storage
            return
        if block is not None and not block.role:
            block.role = role

    def mark_saved(self, tensor: torch.Tensor) -> None:
        """Autograd keeps it."""
        if self._is_active:
            self._mark(tensor, "activation")

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.mark_saved(tensor)
        return without_cycle(tensor)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
