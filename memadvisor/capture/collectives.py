"""Every collective of a traced step, as torch's dispatcher sees it: also those that DDP's reducer issues.

Completion is the future's own callback where the backend offers one (Gloo does for most operations),
else the end of the `Work.wait` that the script called; what neither saw stays None.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Operator of c10d -> the operation's name, and which tensor lists are the full message.
_OPERATIONS = {
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
    "scatter_": ("scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One operation, growing while it runs; times in wall-clock nanoseconds."""

    operation: str
    group: str
    group_size: int
    sequence: int
    size_bytes: int
    dtype: str
    phase: str
    unit: str
    issue_ns: int
    end_ns: int | None = None
    wait_start_ns: int | None = None
    wait_end_ns: int | None = None

    def finish(self, _: object = None) -> None:
        if self.end_ns is None:
            self.end_ns = time.time_ns()


class CollectiveLog:
    """The collectives of one step; `watch_waits` puts a wrapper around `Work.wait` until `close`."""

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        self._sequences: dict[str, int] = defaultdict(int)
        self._original_wait: Any = None

    def record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, issue_ns: int, place: Any
    ) -> list[torch.Tensor]:
        """Note one call; returns the tensors that it moves."""
        known = _OPERATIONS.get(func._schema.name.partition("::")[2])
        if known is None or func.namespace != "c10d":
            return []  # functional collectives reach c10d operators of their own below this one
        operation, position = known
        tensors = [] if position is None else list(_flat(args[position]))
        group, size = _group(args)
        self._sequences[group] += 1
        call = CollectiveCall(
            operation=operation,
            group=group,
            group_size=size,
            sequence=self._sequences[group],
            size_bytes=sum(t.numel() * t.element_size() for t in tensors),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            phase=place.phase,
            unit=place.unit,
            issue_ns=issue_ns,
        )
        self.calls.append(call)
        if not any(tensor.is_cuda for tensor in tensors):
            # NCCL's future is done as soon as the kernel is queued; there its wait has to do.
            _when_done(out, call)
        return tensors

    def watch_waits(self) -> None:
        """Time `Work.wait` from Python. A wait belongs to the oldest operation that nobody waited for."""
        if not dist.is_available() or self._original_wait is not None:
            return
        original = self._original_wait = dist.Work.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            start_ns = time.time_ns()
            try:
                return original(work, *args, **kwargs)
            finally:
                self._note_wait(start_ns, time.time_ns())

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]

    def close(self) -> None:
        if self._original_wait is not None:
            dist.Work.wait = self._original_wait  # type: ignore[method-assign]
            self._original_wait = None

    def _note_wait(self, start_ns: int, end_ns: int) -> None:
        for call in self.calls:
            if call.wait_start_ns is None and call.issue_ns <= start_ns:
                call.wait_start_ns, call.wait_end_ns = start_ns, end_ns
                if call.end_ns is None:
                    call.end_ns = end_ns
                return


def _flat(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)


def _group(args: tuple[Any, ...]) -> tuple[str, int]:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
                return str(group.group_name), int(group.size())
            except (RuntimeError, AttributeError):
                continue  # a ReduceOp, not a group
    return "", 1


def _when_done(out: Any, call: CollectiveCall) -> None:
    boxed = out[-1] if isinstance(out, (list, tuple)) and out else out
    try:
        future = dist.Work.unbox(boxed).get_future()
        if boxed is not None and future is not None:
            future.then(call.finish)
    except (RuntimeError, AttributeError, TypeError):
        return  # no future for this operation on this backend: its wait tells
