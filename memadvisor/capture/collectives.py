"""Every collective and point-to-point operation of a traced step, whichever way it is called.

What DDP's reducer issues in C++, functional collectives, FSDP and the script's own calls all pass torch's
dispatcher, where the label layer meets them. Threads of the script have no label layer: there the methods
of `ProcessGroup` are wrapped for the length of the step, as is `Work.wait`, which is matched to its operation by
the work itself.

Completion is the future's own callback where the backend offers one (Gloo does for most operations),
else the end of the wait; what neither saw stays None.

What NCCL runs is queued when the host has done its part, so neither tells when it is over. There the start is a
mark on the current stream before the call, and the end one in the future's callback: torch runs that at once, on a
stream that waits for the operation's own. Nothing is synchronised. Where there is no such callback, the mark
follows the wait; and where NCCL is asked to wait itself, and gives no Work, it follows the call. Not verified on a GPU.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memadvisor.backends import uses_nccl
from memadvisor.capture.collective_call import CollectiveCall, Mark
from memadvisor.capture.own_mode import OwnMode
from memadvisor.cuda_graphs import is_capturing
from memadvisor.run.torch_names import dtype_name

# Operator of c10d -> the operation's name, and which argument is the full message.
_OPERATIONS: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "gather_": ("gather", 0),
    "gather_into_tensor_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}


# The same of _c10d_functional; _RESULT: what it returns is the full message.
_RESULT = -1
_FUNCTIONAL: dict[str, tuple[str, int]] = {
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", _RESULT),
    "all_gather_into_tensor_out": ("all_gather", _RESULT),
    "all_gather_into_tensor_coalesced": ("all_gather", _RESULT),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
# Methods of ProcessGroup that the functions of torch.distributed call, by the names of torch 2.11 to 2.15.
_METHODS = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "gather", "scatter", "alltoall", "alltoall_base", "send", "recv"),
    *(
        "recv_anysource",
        "barrier",
        "monitored_barrier",
        "_start_coalescing",
        "_end_coalescing",
        "all_gather_single",
    ),
    *("all_gather_single_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("all_to_all_single", "gather_single", "gather_into_tensor"),
)
_TORCHS_OWN = "torch.distributed.distributed_c10d"  # whose functions wait by themselves unless asked not to


class CollectiveLog:
    """The operations of one step; `watch` puts wrappers around c10d's own classes until `close`.

    `mark` marks a moment on the device's current stream; None where operators run on the host. `fail` is told of what of
    ours raises around the script's calls, which go on.
    """

    def __init__(self, mark: Callable[[], Mark] | None, fail: Callable[[BaseException], None]) -> None:
        self._mark = mark
        self.fail = fail
        self.calls: list[CollectiveCall] = []
        self._sequences: dict[tuple[object, ...], int] = defaultdict(int)
        # Whose wait is still to come: by the id of the Work that the script holds, or by the address of a result.
        self._by_work: dict[int, list[CollectiveCall]] = {}
        self._by_address: dict[int, CollectiveCall] = {}
        self._num_coalesced = 0  # calls before the coalescing that is under way
        self._is_coalescing = False
        self._undo: list[Callable[[], None]] = []

    def mark(self) -> Mark | None:
        """To be taken before an operation; None on the host, and while a CUDA graph is captured."""
        if self._mark is None or is_capturing():  # where events have no times
            return None
        return self._mark()

    def record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        issue_ns: int,
        place: Any,
        start_mark: Mark | None = None,
    ) -> list[torch.Tensor]:
        """Note one call; returns the tensors that it moves."""
        first = len(self.calls)
        tensors = self._record(func, args, kwargs, out, issue_ns, place)
        for call in self.calls[first:]:
            if call.is_on_device:
                call.start_mark = start_mark
        return tensors

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, issue_ns: int, place: Any
    ) -> list[torch.Tensor]:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            known = _OPERATIONS.get(name)
            return [] if known is None else self._record_eager(name, known, args, out, issue_ns, place)
        if name == "wait_tensor":
            self._note_tensor_wait(args[0], issue_ns)
            return []
        known_functional = _FUNCTIONAL.get(name)
        if known_functional is None:
            return []
        operation, position = known_functional
        tensors = list(_flat(out if position == _RESULT else args[position]))
        call = self._add(operation, tensors, _named_group(func, args, kwargs), issue_ns, place)
        results = list(_flat(out))
        for result in results:
            self._by_address[result.untyped_storage().data_ptr()] = call
        return results

    def _record_eager(
        self,
        name: str,
        known: tuple[str, int | None],
        args: tuple[Any, ...],
        out: Any,
        issue_ns: int,
        place: Any,
    ) -> list[torch.Tensor]:
        operation, position = known
        tensors = [] if position is None else list(_flat(args[position]))
        group = _group(args)
        peer, tag = _peer(name, args, group)
        call = self._add(operation, tensors, group, issue_ns, place, peer, tag)
        if call.is_on_device:
            _when_done(out, lambda _: self._mark_end(call))
        elif not any(tensor.is_cuda for tensor in tensors):
            # With tensors on a GPU, Gloo's future may be done before they have been copied back.
            _when_done(out, call.finish)
        return tensors

    def _mark_end(self, call: CollectiveCall) -> None:
        if call.is_on_device and call.end_mark is None:
            call.end_mark = self.mark()

    def _add(
        self,
        operation: str,
        tensors: list[torch.Tensor],
        group: Any,
        issue_ns: int,
        place: Any,
        peer: int | None = None,
        tag: int | None = None,
    ) -> CollectiveCall:
        name, size = ("", 1) if group is None else (str(group.group_name), int(group.size()))
        # A group counts its collectives; each direction between two ranks counts its messages.
        key = (name, operation, peer, tag) if operation in ("send", "recv") else (name,)
        self._sequences[key] += 1
        call = CollectiveCall(
            operation=operation,
            group=name,
            group_size=size,
            sequence=self._sequences[key],
            size_bytes=sum(t.numel() * t.element_size() for t in tensors),
            dtype=dtype_name(tensors[0].dtype) if tensors else "",
            phase=place.phase,
            module=place.module,
            unit=place.unit,
            issue_ns=issue_ns,
            peer=peer,
            tag=tag,
            is_on_device=_is_on_device(group, tensors),
        )
        self.calls.append(call)
        return call

    def watch(self, mode: TorchDispatchMode, place: Callable[[], Any]) -> None:
        """Follow works to their waits, and see what threads without `mode` issue; `place` is where we are."""
        if not dist.is_available() or self._undo:
            return
        thread_mode = _ThreadMode(self, place)
        for name in _METHODS:
            if name in dist.ProcessGroup.__dict__:
                original = getattr(dist.ProcessGroup, name)
                self._replace(dist.ProcessGroup, name, self._followed(original, name, mode, thread_mode))
        self._replace(dist.Work, "wait", self._timed_wait(dist.Work.wait))

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        # What the class holds, not what it gives: that is a bare function, which would not bind any more.
        original = owner.__dict__[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, original))

    def _followed(
        self, original: Any, name: str, mode: TorchDispatchMode, thread_mode: TorchDispatchMode
    ) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            first = self._num_coalesced if name == "_end_coalescing" else len(self.calls)
            if any(active is mode for active in _get_current_dispatch_mode_stack()):
                work = original(*args, **kwargs)
            else:
                with thread_mode:  # a thread of the script's own
                    work = original(*args, **kwargs)
            try:
                self._issued(name, work, first)
            except Exception as error:
                self.fail(error)
            return work

        return method

    def _issued(self, name: str, work: Any, first: int) -> None:
        self._is_coalescing = name == "_start_coalescing" or (
            self._is_coalescing and name != "_end_coalescing"
        )
        if name == "_end_coalescing":
            self._num_coalesced = len(self.calls)
        if work is not None and len(self.calls) > first:
            self._by_work[id(work)] = self.calls[first:]
        elif work is None and not self._is_coalescing:
            self._note_waited_inside(self.calls[first:])

    def _note_waited_inside(self, calls: Iterable[CollectiveCall]) -> None:
        """NCCL gives no Work where it is asked to wait: its stream is the current one, or that waits for it already."""
        for call in calls:
            call.asynchronous = False
            self._mark_end(call)
            if not call.is_on_device:
                call.finish()

    def _timed_wait(self, original: Any) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            try:
                return original(work, *args, **kwargs)
            finally:
                end_ns = time.time_ns()
                is_torchs_own = sys._getframe(1).f_globals.get("__name__") == _TORCHS_OWN
                try:
                    for call in self._by_work.pop(id(work), ()):
                        call.waited(start_ns, end_ns)
                        self._mark_end(call)
                        call.asynchronous = not is_torchs_own
                except Exception as error:
                    self.fail(error)

        return wait

    def _note_tensor_wait(self, tensor: torch.Tensor, start_ns: int) -> None:
        call = self._by_address.pop(tensor.untyped_storage().data_ptr(), None)
        if call is not None:
            call.waited(start_ns, time.time_ns())
            self._mark_end(call)


class _ThreadMode(OwnMode):
    """Sees the collectives of one call in a thread where the label layer is not."""

    def __init__(self, log: CollectiveLog, place: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._place = place

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        issue_ns, start_mark = time.time_ns(), self._log.mark()
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            try:
                self._log.record(func, args, kwargs or {}, out, issue_ns, self._place(), start_mark)
            except Exception as error:  # of which nobody else hears in this thread
                self._log.fail(error)
        return out


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _group(args: tuple[Any, ...]) -> Any:
    """The process group among an operator's arguments."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument)
            except (RuntimeError, AttributeError):
                continue  # a ReduceOp, not a group
    return None


def _named_group(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The process group that a functional collective names."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    try:
        return dist.distributed_c10d._resolve_process_group(given["group_name"])  # type: ignore[attr-defined]
    except (KeyError, RuntimeError, ValueError):
        return None


def _peer(name: str, args: tuple[Any, ...], group: Any) -> tuple[int | None, int | None]:
    """(other side's rank in the world, tag) of a send or receive; the arguments are (tensors, group, peer, tag)."""
    if name == "recv_any_source_":
        return None, int(args[2])
    if name not in ("send", "recv_") or group is None:
        return None, None
    return int(dist.get_global_rank(group, int(args[2]))), int(args[3])


def _is_on_device(group: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether NCCL runs it: of a barrier, which has no tensors, the group's backend for CUDA tells."""
    if group is None or any(not tensor.is_cuda for tensor in tensors):
        return False
    return uses_nccl(group)


def _when_done(out: Any, callback: Callable[[Any], None]) -> None:
    boxed = out[-1] if isinstance(out, (list, tuple)) and out else out
    try:
        future = dist.Work.unbox(boxed).get_future()
        if boxed is not None and future is not None:
            future.then(callback)
    except (RuntimeError, AttributeError, TypeError):
        return  # no future for this operation on this backend: its wait tells
