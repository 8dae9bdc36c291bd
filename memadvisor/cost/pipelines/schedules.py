"""The schedules by name: what users write, what each needs of devices, microbatches and chunks, and its order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from memadvisor.cost.pipelines.graph import PipelineGraph, pipeline_graph
from memadvisor.cost.pipelines.looped import breadth_first, interleaved
from memadvisor.cost.pipelines.one_chunk import double_buffered_weights, gpipe, one_forward_one_backward
from memadvisor.cost.pipelines.work import PipelineOrder
from memadvisor.errors import UsageError

_ORDERS: dict[str, Callable[[int, int, int], PipelineOrder]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "2bw": double_buffered_weights,
}
SCHEDULES = tuple(_ORDERS)
_ALIASES = {
    "afab": "gpipe",
    "dapple": "1f1b",
    "pipedream-flush": "1f1b",
    "1f1b-i": "interleaved",
    "i-1f1b": "interleaved",
    "1f1b-interleaved": "interleaved",
    "interleaved-1f1b": "interleaved",
    "vpp": "interleaved",
    "bfs": "breadth-first",
    "looped-bfs": "breadth-first",
    "pipedream-2bw": "2bw",
    "zbh1": "zb-h1",
    "zbh2": "zb-h2",
    "zbv": "zb-v",
    "zb1p": "zb-1p",
    "zb2p": "zb-2p",
}
_LOOPED = ("interleaved", "breadth-first")
# Bytes of the graphs that are kept: up to 64 of 2**18 pieces, at 28 bytes each.
_LARGEST_KEPT = 2**18


def canonical_name(name: str) -> str:
    """The schedule meant by `1F1B`, `DAPPLE`, `PipeDream-Flush`, `1F1B-I`, `ZB-1p`... Raises UsageError for others."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    found = _ALIASES.get(plain, plain)
    if found not in SCHEDULES:
        raise UsageError(
            f"{name!r} is not a pipeline schedule.", hint=f"write one of {', '.join(SCHEDULES)}."
        )
    return found


def check_schedule(name: str, num_devices: int, num_microbatches: int, chunks_per_device: int) -> None:
    """Raise UsageError, in one line, where the schedule cannot run so."""
    if num_devices < 1 or num_microbatches < 1 or chunks_per_device < 1:
        raise UsageError(
            f"A pipeline needs at least one device, microbatch and chunk, not {num_devices}, {num_microbatches} "
            f"and {chunks_per_device}."
        )
    needed = None if name in _LOOPED else 1
    if needed is not None and chunks_per_device != needed:
        raise UsageError(
            f"{name} has {needed} chunk{'s' if needed > 1 else ''} a device, not {chunks_per_device}.",
            hint=f"cut the model into {needed * num_devices}, or take interleaved or breadth-first.",
        )
    if name == "interleaved" and num_microbatches % num_devices:
        raise UsageError(
            f"interleaved needs microbatches in whole groups of {num_devices}, one for each device, "
            f"not {num_microbatches}.",
            hint="change the gradient accumulation, or take 1f1b or breadth-first.",
        )


def pipeline_order(
    schedule: str, num_devices: int, num_microbatches: int, chunks_per_device: int = 1
) -> PipelineOrder:
    """Who does what after what; raises UsageError for a schedule that is not known or cannot run so."""
    name = canonical_name(schedule)
    check_schedule(name, num_devices, num_microbatches, chunks_per_device)
    return _ORDERS[name](num_devices, num_microbatches, chunks_per_device)


def graph_of(
    schedule: str, num_devices: int, num_microbatches: int, chunks_per_device: int = 1
) -> PipelineGraph:
    """The order with its dependencies resolved, kept for the next call unless it is large."""
    name = canonical_name(schedule)
    check_schedule(name, num_devices, num_microbatches, chunks_per_device)
    num_pieces = 3 * num_devices * num_microbatches * chunks_per_device
    make = _kept_graph if num_pieces <= _LARGEST_KEPT else _graph
    return make(name, num_devices, num_microbatches, chunks_per_device)


def _graph(name: str, num_devices: int, num_microbatches: int, chunks_per_device: int) -> PipelineGraph:
    return pipeline_graph(_ORDERS[name](num_devices, num_microbatches, chunks_per_device))


_kept_graph = lru_cache(maxsize=64)(_graph)
