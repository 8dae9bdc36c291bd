"""What autograd keeps of a unit's forward: as it is, on another tier, or in fewer bits, until the backward.

Saved-tensor hooks see each tensor that autograd keeps while the unit's forward runs. What goes is storages, each once,
however many views of it are kept: a place remembers which view of it autograd asked for. What stays is
    parameters, buffers, and what the unit is called with that needs no gradient (masks, positions, a batch): others
    keep them alive anyway;
    storages below MIN_BYTES, whose transfer costs more calls than it frees memory;
    tensors that are not plain and dense, and memory that is not torch's own (numpy's, or shared).
Under hooks autograd no longer notices that a saved tensor was modified in place, so it is noticed here.

Hooks outside of these see what stays, as before; what goes they do not, for what is made of it (codes, nothing) is none of
the script's. A recorder's own hooks are told, by `keep`, what of it is on the device and when; the hooks next outside are
asked, through those of the engine itself.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from memadvisor.cost.saved import MIN_BYTES
from memadvisor.engines.lanes.lanes import Ticket
from memadvisor.engines.lanes.tiers import Tier
from memadvisor.engines.sharding.saved import innermost_foreign, storage_id, top_hooks


class Held(Protocol):
    """A recorder's note of one saved tensor. Its end is the end of what was kept."""

    def used(self) -> None: ...
    def leaves(self) -> None: ...
    def arrives(self, tensor: torch.Tensor) -> None: ...


class Record(Protocol):
    """Who records what autograd keeps. `aside` is around what is done to keep it."""

    def aside(self) -> contextlib.AbstractContextManager[None]: ...
    def keep(self, saved: torch.Tensor, held: torch.Tensor) -> Held | None: ...


class Stored(Protocol):
    """One storage that autograd keeps, in whatever form."""

    def here(self) -> torch.UntypedStorage: ...
    def recorded(self, record: Record, tensor: torch.Tensor) -> Held | None: ...


class Holder(Protocol):
    """The call of a unit's forward that tensors are saved in. What it has no form for (None) stays as it is."""

    def found(self, tensor: torch.Tensor) -> Stored | None: ...
    def brings(self, stored: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class _Sent:
    """A storage's bytes on a tier, or on their way to it."""

    tier: Tier
    block: Any
    ticket: Ticket


class Kept:
    """One storage that autograd keeps: here, on a tier, or on the way between the two.

    Who holds this keeps the bytes; what was sent leaves the device with `settle`, if nobody else holds it.
    """

    __slots__ = (
        "__weakref__",
        "_arriving",
        "_held",
        "_reference",
        "_sent",
        "device",
        "size_bytes",
        "storage",
        "version",
    )

    def __init__(self, storage: torch.UntypedStorage, version: int) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.device = storage.device
        self.size_bytes = storage.nbytes()
        self.version = version  # of the tensor that was saved last
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # torch has no types for it
        self._sent: _Sent | None = None
        self._arriving: tuple[torch.UntypedStorage, Any] | None = None
        self._held: list[weakref.ref[Held]] = []  # by the places

    def recorded(self, record: Record, tensor: torch.Tensor) -> Held | None:
        held = record.keep(tensor, tensor)
        if held is not None:
            self._held.append(weakref.ref(held))
            if self.is_away:
                held.leaves()
        return held

    @property
    def is_under_way(self) -> bool:
        """Whether it is being sent, and has not left."""
        return self._sent is not None and self.storage is not None

    @property
    def is_away(self) -> bool:
        return self.storage is None and self._arriving is None

    def send(self, tier: Tier) -> None:
        """Begin to send what is here, and has not been sent."""
        if self.storage is not None and self._sent is None:
            block = tier.allocate(self.size_bytes)
            self._sent = _Sent(tier, block, tier.write(block, _bytes_of(self.storage)))

    def settle(self) -> None:
        """Let what was sent leave the device, when it is over there. Raises OSError, and keeps it, where it is not."""
        if self._sent is None or self.storage is None:
            return
        try:
            self._sent.ticket.wait()
        except OSError:
            self._forget()
            raise
        for held in self._holding():
            held.leaves()
        self.storage = None

    def fetch(self, label: Callable[[torch.Tensor], None]) -> None:
        """Begin to bring it back, unless it is here, or somebody else has kept it."""
        if not self.is_away or self._sent is None:
            return
        if (storage := self.held_elsewhere()) is not None:
            self.storage = storage
            self._forget()
            if self._held:
                self._arrives(_bytes_of(storage))
            return
        target = torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        label(target)
        self._arrives(target)
        sent = self._sent
        self._arriving = (target.untyped_storage(), sent.tier.read(sent.block, target))

    def held_elsewhere(self) -> torch.UntypedStorage | None:
        """The very storage, where somebody else has kept it alive."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage  # type: ignore[no-any-return]  # torch has no types for it

    def here(self) -> torch.UntypedStorage:
        """The storage, once it has come. Raises RuntimeError where it cannot be brought back."""
        if self._arriving is not None:
            storage, ticket = self._arriving
            try:
                ticket.wait()
            except OSError as error:
                raise RuntimeError(f"activations could not be read back from disk: {error}") from error
            self.storage, self._arriving = storage, None
            self._forget()
        if self.storage is None:
            raise AssertionError("what is away is fetched first")
        return self.storage

    def _holding(self) -> Iterator[Held]:
        return (held for reference in self._held if (held := reference()) is not None)

    def _arrives(self, tensor: torch.Tensor) -> None:
        for held in self._holding():
            held.arrives(tensor)

    def _forget(self) -> None:
        """Nothing of it is needed on the tier."""
        if self._sent is not None:
            self._sent.tier.free(self._sent.block)
            self._sent = None

    def __del__(self) -> None:
        self._forget()


class KeptView:
    """Stands for a tensor that is kept: a view of its storage, wherever that is."""

    __slots__ = ("dtype", "held", "holder", "offset", "probe", "size", "stored", "stride", "version")

    def __init__(
        self, tensor: torch.Tensor, stored: Stored, holder: Holder, held: Held | None = None
    ) -> None:
        self.stored = stored
        self.holder = holder
        self.held = held
        self.dtype = tensor.dtype
        self.size, self.stride = tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self.version = tensor._version
        self.probe = _probe(tensor)

    def tensor(self) -> torch.Tensor:
        """The values, brought here if need be; no part of any graph."""
        self.holder.brings(self.stored)
        if self.held is not None:
            self.held.used()
        storage = self.stored.here()
        whole = torch.empty(0, dtype=self.dtype, device=storage.device)
        return whole.set_(storage, self.offset, self.size, self.stride)


def kept_view(tensor: torch.Tensor, holder: Holder) -> KeptView | None:
    """What stands for a tensor that a holder keeps from now on; None where it has to stay as it is."""
    stored = holder.found(tensor) if may_go(tensor) else None
    return None if stored is None else KeptView(tensor, stored, holder)


class _Stays:
    """Stands for a saved tensor that stays: itself without its graph, or what the hooks outside of ours made of it."""

    __slots__ = ("is_packed", "probe", "value", "version")

    def __init__(self, tensor: torch.Tensor, outer: Callable[[torch.Tensor], Any] | None) -> None:
        self.version = tensor._version
        self.is_packed = outer is not None
        if outer is not None:
            self.value = outer(tensor)
            self.probe = _probe(tensor)
        else:
            # With its graph, a result of the operator that saves it would keep itself alive.
            self.value = self.probe = tensor if tensor.grad_fn is None else tensor.detach()


class SavedActivations:
    """Saved-tensor hooks for one call of a unit; `around` are the hooks that were there before."""

    def __init__(self, holder: Holder, stay: Iterable[torch.Tensor]) -> None:
        self._holder = holder
        self._stay = {storage_id(tensor) for tensor in stay}
        self._outer = top_hooks()
        self._record = _recorder_of(self._outer)

    def __enter__(self) -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)

    def __exit__(self, *exception: object) -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._record is None:
            return self._packed(tensor)
        with self._record.aside():
            return self._packed(tensor)

    def _packed(self, tensor: torch.Tensor) -> Any:
        stored = self._holder.found(tensor) if self._goes(tensor) else None
        if stored is not None:
            held = None if self._record is None else stored.recorded(self._record, tensor)
            return KeptView(tensor, stored, self._holder, held)
        return _Stays(tensor, self._outer[0] if self._outer is not None else None)

    def _goes(self, tensor: torch.Tensor) -> bool:
        return may_go(tensor) and storage_id(tensor) not in self._stay

    def unpack(self, packed: Any) -> Any:
        if packed.probe is not None and packed.probe._version != packed.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor is at version {packed.probe._version}; expected version {packed.version} instead."
            )
        if isinstance(packed, KeptView):
            return packed.tensor()
        if packed.is_packed and self._outer is not None:
            return self._outer[1](packed.value)
        return packed.value


def _recorder_of(outer: tuple[Callable[[torch.Tensor], Any], Any] | None) -> Record | None:
    """The recorder whose hooks are the next ones outside, but for the engine's own; None where the script's are."""
    owner: Any = getattr(innermost_foreign(outer and outer[0]), "__self__", None)
    return owner if hasattr(owner, "keep") and hasattr(owner, "aside") else None


def stays(module: torch.nn.Module, arguments: Any) -> list[torch.Tensor]:
    """What others keep alive anyway: parameters, buffers, and what the unit is called with that needs no gradient."""
    leaves: list[Any] = tree_leaves(arguments)
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.requires_grad]
    return [*module.parameters(), *module.buffers(), *given]


def may_go(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage is large enough, and of a kind that can be put elsewhere."""
    if not is_plain(tensor) or isinstance(tensor._base, torch.nn.Parameter):
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() < MIN_BYTES or not storage.resizable():
        return False
    return (
        storage.device.type != "cpu" or not storage.is_shared()
    )  # torch says of all CUDA storages that they are


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of dense memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch._is_functional_tensor(tensor)
    )


def _probe(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor without elements, that counts what modifies `tensor` in place; None for one of the script's kinds."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    probe = tensor.detach()
    probe.data = _empty(tensor.dtype, tensor.device)
    return probe


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class KeptByStorage:
    """What is kept now, so that units that keep the same storage share it."""

    def __init__(self) -> None:
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()

    def of(self, storage: torch.UntypedStorage, version: int) -> tuple[Kept, bool]:
        """What is kept of a storage, and whether it is new."""
        key = storage._cdata  # of no other storage as long as somebody refers to this one, if weakly
        kept = self._kept.get(key)
        if kept is not None and kept.version == version:
            return kept, False
        if kept is not None and not kept.is_under_way and kept.storage is not None:
            kept.version = (
                version  # nothing has been sent; what was saved before is found out where it is asked for
            )
            return kept, False
        kept = self._kept[key] = Kept(storage, version)
        return kept, True
