"""Saved-tensor hooks of the traced step: what autograd keeps, and until when.

Autograd asks the innermost hooks alone. An engine whose own hooks are inside of these, and that keeps a saved tensor in
another form or place, says so by `keep`: what is on the device for it, and from when to when.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import time_ns
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from memadvisor.capture.holders import Holders, SavedStorage
from memadvisor.capture.label_log import LabelLog, SavedTensor
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.open_spans import called_by_operators
from memadvisor.capture.tensor_storage import PLAIN_TENSORS, plain_tensors
from memadvisor.never_compiled import never_compiled


class SavedTensorHooks:
    """Pack and unpack hooks that give autograd back the very tensor, and note when it lets go."""

    def __init__(
        self,
        mode: LabelMode,
        log: LabelLog,
        fail: Callable[[BaseException], None],
        also: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._fail = fail  # told of what of ours raises, while autograd keeps what it would
        self._also = also  # autograd asks the innermost hooks alone
        self._mode = mode
        self._log = log
        self.holders = Holders(log)

    @called_by_operators
    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        try:
            return self._pack(tensor)
        except Exception as error:
            self._mode.is_active = False
            self._fail(error)
            return _Kept(without_cycle(tensor), None)

    def _pack(self, tensor: torch.Tensor) -> Any:
        mode = self._mode
        address = mode.address(tensor)
        if self._also is not None:
            self._also(tensor)
        was_active = mode.is_active
        needs_gradient, is_leaf = tensor.requires_grad, tensor.is_leaf
        given = tensor
        if type(tensor) in PLAIN_TENSORS:
            is_own = bool(address) and not (needs_gradient and is_leaf)
            if is_own or tensor.grad_fn is not None:
                tensor = own_alias(tensor)
        else:
            mode.is_active, is_own = False, False  # our own detach is none of the script's
            tensor = without_cycle(tensor)
            mode.is_active = was_active
        if not was_active:
            return _Kept(tensor, None)
        if not address:
            return _Kept(tensor, *self._rows_inside(tensor, needs_gradient, given))
        storage = tensor.untyped_storage()
        row = self._row(tensor, storage, address, needs_gradient)
        return _Kept(tensor, row, (self.holders.save(storage, address),) if is_own else ())

    @staticmethod
    @never_compiled
    def unpack(kept: Any) -> torch.Tensor:
        if kept.row is not None:
            kept.row.unpacked_ns = time_ns()
            for row in kept.others:
                row.unpacked_ns = kept.row.unpacked_ns
        tensor: torch.Tensor = kept.tensor
        return tensor

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What runs inside of this, in the midst of an operator's saving, is no operator that autograd has a node for."""
        was_named, self._mode.names_nodes = self._mode.names_nodes, False
        try:
            yield
        finally:
            self._mode.names_nodes = was_named

    def keep(self, saved: torch.Tensor, held: torch.Tensor) -> Held | None:
        """An engine keeps `held` for `saved`, the very tensor or another form of it, as long as it has the result."""
        address = self._mode.address(held)
        if not address or not self._mode.is_active:
            return None
        if self._also is not None:
            self._also(held)
        row = self._row(held, held.untyped_storage(), address, saved.requires_grad)
        if held is not saved:
            row.copy_of = (self._mode.address(saved), row.saved_ns)
            row.original_bytes = saved.untyped_storage().nbytes()
        return Held(self, row)

    def _row(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, address: int, needs_gradient: bool
    ) -> SavedTensor:
        mode, now_ns = self._mode, time_ns()
        if address not in mode.sightings:
            mode.sight(tensor, address, now_ns)
        row = SavedTensor(
            address,
            storage.nbytes(),
            mode.describe(tensor)[1],
            mode.here,
            now_ns,
            None,
            None,
            _get_sequence_nr(),
            needs_gradient,
        )
        self._log.saved.append(row)
        return row

    def _rows_inside(
        self, tensor: torch.Tensor, needs_gradient: bool, given: torch.Tensor
    ) -> tuple[SavedTensor | None, tuple[SavedStorage, ...], tuple[SavedTensor, ...]]:
        """Of a tensor without memory of its own: the tensors that it wraps, as a DTensor does this rank's part. Those that
        the tensor `given` to autograd wraps, too, the script may have."""
        if type(tensor) in PLAIN_TENSORS:
            return None, (), ()
        rows, storages = [], []
        scripts = {id(part) for part in plain_tensors(given)}
        for part in plain_tensors(tensor):
            if part is tensor or not (address := self._mode.address(part)):
                continue
            storage = part.untyped_storage()
            rows.append(self._row(part, storage, address, needs_gradient))
            if id(part) not in scripts:
                storages.append(self.holders.save(storage, address, is_wrapped=True))
        return (rows[0], tuple(storages), tuple(rows[1:])) if rows else (None, (), ())

    def _back(self, first: SavedTensor, tensor: torch.Tensor) -> SavedTensor | None:
        """The row of bytes that were moved and are on the device again, in `tensor`; None after the step."""
        address = self._mode.address(tensor) if self._mode.is_active else 0
        if not address:
            return None
        now_ns = time_ns()
        size_bytes = tensor.untyped_storage().nbytes()
        row = replace(
            first,
            address=address,
            size_bytes=size_bytes,
            saved_ns=now_ns,
            unpacked_ns=None,
            released_ns=None,
            copy_of=first.copy_of or (first.address, first.saved_ns),
        )
        self._log.saved.append(row)
        return row


def without_cycle(tensor: torch.Tensor) -> torch.Tensor:
    """What a pack hook may give back. Of an operator's own result autograd would otherwise keep the graph that
    keeps the result, and what no backward runs through would never be freed; it restores the rest by itself."""
    if tensor.grad_fn is None:
        return tensor
    return tensor.data if type(tensor) not in PLAIN_TENSORS else own_alias(tensor)


def own_alias(tensor: torch.Tensor) -> torch.Tensor:
    # No mode, ours or the script's, is to see the detach that this is: it is none of the script's.
    with torch._C._DisableTorchDispatch():
        return tensor.data


class _Kept:
    """Stands for a saved tensor inside autograd; its end is the moment that autograd lets go."""

    __slots__ = ("others", "row", "storages", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        row: SavedTensor | None,
        storages: tuple[SavedStorage, ...] = (),
        others: tuple[SavedTensor, ...] = (),
    ) -> None:
        self.tensor = tensor
        self.row = row
        self.storages = storages
        self.others = others  # of a wrapper of several tensors, all but the first

    @never_compiled
    def __del__(self) -> None:
        if self.row is not None:
            self.row.released_ns = time_ns()
            for row in self.others:
                row.released_ns = self.row.released_ns
        for storage in self.storages:
            storage.let_go()


class Held:
    """One saved tensor that an engine keeps: its bytes are on the device until `leaves`, and again from `arrives` on."""

    __slots__ = ("__weakref__", "_first", "_hooks", "_row")

    def __init__(self, hooks: SavedTensorHooks, row: SavedTensor) -> None:
        self._hooks = hooks
        self._first = self._row = row

    @never_compiled
    def used(self) -> None:
        """The backward has asked for it."""
        self._row.unpacked_ns = time_ns()

    @never_compiled
    def leaves(self) -> None:
        if self._row.released_ns is None:
            self._row.released_ns = time_ns()

    @never_compiled
    def arrives(self, tensor: torch.Tensor) -> None:
        self._row = self._hooks._back(self._first, tensor) or self._row

    @never_compiled
    def __del__(self) -> None:
        self.leaves()
