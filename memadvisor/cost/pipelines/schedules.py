"""The schedules by name: what users write, what each needs of devices, microbatches and chunks, and its order."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from memadvisor.cost.pipelines.automatic import AUTOMATIC, automatic_graph
from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.graph import PipelineGraph, pipeline_graph
from memadvisor.cost.pipelines.looped import breadth_first, interleaved
from memadvisor.cost.pipelines.one_chunk import double_buffered_weights, gpipe, one_forward_one_backward
from memadvisor.cost.pipelines.two_ways import chimera, dualpipe, dualpipe_v
from memadvisor.cost.pipelines.v_shape import zb_v
from memadvisor.cost.pipelines.work import PipelineOrder
from memadvisor.cost.pipelines.zero_bubble import zb_h1, zb_h2
from memadvisor.errors import UsageError
from memadvisor.schedule_names import SCHEDULES, V_SHAPED, schedule_name

_ORDERS: dict[str, Callable[[int, int, int], PipelineOrder]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "bpipe": one_forward_one_backward,
    "2bw": double_buffered_weights,
    "chimera": chimera,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}
assert {*_ORDERS, *AUTOMATIC} == set(SCHEDULES)
_LOOPED = ("interleaved", "breadth-first")
# Bytes of the graphs that are kept: up to 64 of 2**18 pieces, at 28 bytes each.
_LARGEST_KEPT = 2**18


def canonical_name(name: str) -> str:
    """The schedule meant by `1F1B`, `DAPPLE`, `PipeDream-Flush`, `1F1B-I`, `ZB-1p`... Raises UsageError for others."""
    found = schedule_name(name)
    if found is None:
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
    needed = 2 if name in V_SHAPED else 1
    if name not in _LOOPED and chunks_per_device != needed:
        raise UsageError(
            f"{name} has {needed} chunk{'s' if needed > 1 else ''} of the model a device, not {chunks_per_device}.",
            hint=f"cut the model into {needed * num_devices} chunks, or take another schedule.",
        )
    if name == "interleaved" and chunks_per_device > 1 and num_microbatches % num_devices:
        raise UsageError(
            f"interleaved needs microbatches in whole groups of {num_devices}, one for each device, "
            f"not {num_microbatches}.",
            hint="change the gradient accumulation, or take 1f1b or breadth-first.",
        )
    if name in ("chimera", "dualpipe") and num_devices % 2:
        raise UsageError(
            f"{name} runs two pipelines in opposite directions over an even number of devices, not {num_devices}."
        )
    if name == "dualpipe" and (num_microbatches % 2 or num_microbatches < 2 * num_devices):
        raise UsageError(
            f"dualpipe on {num_devices} devices needs an even number of microbatches of at least "
            f"{2 * num_devices}, not {num_microbatches}."
        )
    if name == "dualpipe-v" and num_microbatches < 2 * num_devices:
        raise UsageError(
            f"dualpipe-v on {num_devices} devices needs at least {2 * num_devices} microbatches, not {num_microbatches}."
        )


def pipeline_order(
    schedule: str, num_devices: int, num_microbatches: int, chunks_per_device: int = 1
) -> PipelineOrder:
    """Who does what after what; raises UsageError for a schedule that is not known or cannot run so.

    Of the automatic ones, whose order depends on times, it is the one for F = B = W and free transfers.
    """
    name = canonical_name(schedule)
    check_schedule(name, num_devices, num_microbatches, chunks_per_device)
    if name in AUTOMATIC:
        alike = ChunkCosts(forward_s=1.0, input_backward_s=1.0, weight_backward_s=1.0)
        return automatic_graph(name, (alike,) * num_devices, (0.0,) * num_devices, num_microbatches).order
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
