"""Orders with several chunks a device, dealt round robin: chunk c is on device c mod p."""

from __future__ import annotations

from memadvisor.cost.pipelines.one_chunk import one_forward_one_backward
from memadvisor.cost.pipelines.work import Codes, Kind, PipelineOrder


def interleaved(num_devices: int, num_microbatches: int, chunks_per_device: int) -> PipelineOrder:
    """Interleaved 1F1B (arXiv:2104.04473): p microbatches through a chunk, then through the next one.

    Device d has 2(p-1-d) + (v-1)p forwards before its first backward; then one of each in turn. With one chunk a
    device that is 1F1B, which needs no second forward in flight for each device that follows.
    """
    if chunks_per_device == 1:
        return one_forward_one_backward(num_devices, num_microbatches)
    num_chunks = num_devices * chunks_per_device
    codes = Codes(num_chunks, num_microbatches)
    total = num_microbatches * chunks_per_device
    orders = []
    for device in range(num_devices):
        chunks = range(device, num_chunks, num_devices)
        forwards = _by_groups(codes, Kind.F, chunks, num_devices)
        backwards = _by_groups(codes, Kind.BW, chunks[::-1], num_devices)
        warm_up = min(2 * (num_devices - 1 - device) + (chunks_per_device - 1) * num_devices, total)
        order = forwards[:warm_up] + [0] * (2 * (total - warm_up))
        order[warm_up::2] = forwards[warm_up:]
        order[warm_up + 1 :: 2] = backwards[: total - warm_up]
        orders.append(order + backwards[total - warm_up :])
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        codes=tuple(orders),
    )


def breadth_first(num_devices: int, num_microbatches: int, chunks_per_device: int) -> PipelineOrder:
    """All microbatches through a chunk before the next chunk (arXiv:2211.05953): GPipe in loops.

    A chunk's weights are needed in one stretch, once forward and once backward, which spares gathers under ZeRO-3.
    """
    num_chunks = num_devices * chunks_per_device
    codes = Codes(num_chunks, num_microbatches)
    orders = []
    for device in range(num_devices):
        chunks = range(device, num_chunks, num_devices)
        orders.append(
            _by_groups(codes, Kind.F, chunks, num_microbatches)
            + _by_groups(codes, Kind.BW, chunks[::-1], num_microbatches)
        )
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        codes=tuple(orders),
    )


def _by_groups(codes: Codes, kind: Kind, chunks: range, group: int) -> list[int]:
    """`group` microbatches through each chunk in turn, then the next `group` of them."""
    order: list[int] = []
    firsts = [codes.first(kind, chunk) for chunk in chunks]
    for start in range(0, codes.num_microbatches, group):
        end = min(start + group, codes.num_microbatches)
        for first in firsts:
            order += range(first + start, first + end)
    return order
