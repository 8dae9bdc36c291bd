"""Every call of a module in a traced step: when, and which storages went in and came out.

What a call took in is what checkpointing it would have to keep, whether its own operators save it or not.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memadvisor.capture.module_info import ModuleInfo
from memadvisor.capture.tensor_storage import plain_tensors
from memadvisor.key_value_caches import caches_among, own_place, tensors_of

_MAX_DEPTH = 6  # of containers around a tensor: arguments are nested flatly, and a cycle must end


_Returned = tuple[weakref.ref[torch.Tensor], int]  # a tensor, and its version then


@dataclass(slots=True)
class SeenCall:
    """A call that has begun; its tensors are addresses of storages. `end_ns` None: it is still running."""

    info: ModuleInfo
    phase: str
    micro_batch: int
    start_ns: int
    versions: list[tuple[int, int]]  # of the positional tensors when it began: (id, version)
    takes_last: bool  # see run/records.py
    is_transformed: bool  # too
    end_ns: int | None = None
    inputs: tuple[
        tuple[int, bool, bool], ...
    ] = ()  # (address, whether the call wrote into it, needs gradient)
    outputs: tuple[int, ...] = ()
    cached: tuple[int, ...] = ()  # of a unit: what it has put into a key/value cache that had nothing of it


class ModuleCallLog:
    """All calls of a step, in order of their start. Holds no tensor.

    `given`: what the script itself called a model with, as (address, time in ns); a batch that is a small part of what
    is stored there (a data set as a whole) is left out.
    """

    def __init__(self, address_of: Callable[[torch.Tensor], int]) -> None:
        self.calls: list[SeenCall] = []
        self.given: list[tuple[int, int]] = []
        self._address_of = address_of
        self._open: dict[int, SeenCall] = {}  # by the depth of the module stack
        self._returned: dict[int, _Returned] = {}  # by depth, what the last call there gave

    def enter(self, info: ModuleInfo, args: Any, phase: str, micro_batch: int, depth: int) -> None:
        """A module is called; `depth` modules run around it. Evaluations keep nothing and are left out."""
        self._open.pop(depth, None)  # an exception may have passed by the end of the last one
        last = self._returned.pop(depth, None)
        self._returned.pop(depth + 1, None)
        if phase not in ("forward", "recompute") or not torch.is_grad_enabled():
            return
        versions = [(id(tensor), tensor._version) for tensor in _tensors(args) if not tensor.is_inference()]
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        call = SeenCall(
            info, phase, micro_batch, time.time_ns(), versions, _is_handed_on(last, args), is_transformed
        )
        self._open[depth] = call
        self.calls.append(call)

    def leave(
        self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any, depth: int
    ) -> Collection[int]:
        """The call has ended; the addresses of what it was called with."""
        call = self._open.pop(depth, None)
        if call is None:
            return ()
        call.end_ns = time.time_ns()
        call.takes_last &= not kwargs
        if isinstance(output, torch.Tensor):
            self._returned[depth] = weakref.ref(output), _version(output)
        before = dict(call.versions)
        inputs: dict[int, tuple[bool, bool]] = {}
        for tensor in _tensors((args, kwargs)):
            changed = not tensor.is_inference() and tensor._version != before.get(id(tensor), tensor._version)
            for address in self._addresses(tensor):
                was_changed, needed = inputs.get(address, (False, True))
                inputs[address] = was_changed or changed, needed and tensor.requires_grad
            if not depth:
                self.given += (
                    (address, call.start_ns) for plain, address in self._placed(tensor) if _is_most(plain)
                )
        call.inputs = tuple((address, *known) for address, known in inputs.items())
        call.outputs = self._all_addresses(_tensors(output))
        if call.info.is_unit and call.phase == "forward":
            call.cached = self._all_addresses(_put_into_caches(module, args, kwargs))
        return inputs.keys()

    def _all_addresses(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(address for tensor in tensors for address in self._addresses(tensor)))

    def _addresses(self, tensor: torch.Tensor) -> Iterator[int]:
        return (address for _, address in self._placed(tensor))

    def _placed(self, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
        for plain in plain_tensors(tensor):
            address = self._address_of(plain)
            if address:
                yield plain, address


def _is_most(plain: torch.Tensor) -> bool:
    """Of what is stored there."""
    return 2 * plain.nbytes >= plain.untyped_storage().nbytes()


def _is_handed_on(last: _Returned | None, args: Any) -> bool:
    """Whether a call has what the last one returned, unchanged, as its one positional argument."""
    tensor = None if last is None else last[0]()
    if last is None or tensor is None or len(args) != 1:
        return False
    return args[0] is tensor and _version(tensor) == last[1]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _put_into_caches(module: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """What a module that has ended has put into caches that had nothing of it: a plan that recomputes it calls it
    without them (engines/activations/caches.py). Such a cache is now as long as what the module was called with.
    """
    caches = caches_among(args, kwargs)
    first = next(_tensors((args, kwargs)), None)
    place = own_place(module) if caches and first is not None and first.dim() > 1 else None
    if place is not None and first is not None:
        for cache in caches:
            if cache.get_seq_length(place) == first.shape[1]:
                yield from tensors_of(cache, place)


def _tensors(values: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(values, torch.Tensor):
        yield values
    elif depth < _MAX_DEPTH and isinstance(values, (list, tuple, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value, depth + 1)
