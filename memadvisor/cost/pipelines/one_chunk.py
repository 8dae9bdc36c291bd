"""Orders with one chunk a device and no split of the backward: GPipe and 1F1B."""

from __future__ import annotations

from memadvisor.cost.pipelines.work import Codes, Ending, Kind, PipelineOrder


def gpipe(num_devices: int, num_microbatches: int, chunks_per_device: int = 1) -> PipelineOrder:
    """All forwards, then all backwards, the last microbatch's first (arXiv:1811.06965)."""
    codes = Codes(num_devices, num_microbatches)
    orders = []
    for device in range(num_devices):
        forward, backward = codes.first(Kind.F, device), codes.first(Kind.BW, device)
        orders.append(
            [
                *range(forward, forward + num_microbatches),
                *range(backward + num_microbatches - 1, backward - 1, -1),
            ]
        )
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=num_devices,
        num_microbatches=num_microbatches,
        codes=tuple(orders),
    )


def one_forward_one_backward(
    num_devices: int, num_microbatches: int, chunks_per_device: int = 1
) -> PipelineOrder:
    """1F1B: p-1-d forwards on device d, then one forward and one backward in turn, then the backwards left.

    PipeDream-flush and DAPPLE (arXiv:2006.09503, arXiv:2007.01045) have this order.
    """
    return _one_forward_one_backward(num_devices, num_microbatches)


def double_buffered_weights(
    num_devices: int, num_microbatches: int, chunks_per_device: int = 1
) -> PipelineOrder:
    """PipeDream-2BW (arXiv:2006.09503): 1F1B that never empties, with two versions of the weights.

    The order is that of one step's microbatches; the next step's follow without a flush.
    """
    return _one_forward_one_backward(
        num_devices, num_microbatches, weight_versions=2, ending=Ending.NEVER_EMPTY
    )


def _one_forward_one_backward(
    num_devices: int, num_microbatches: int, weight_versions: int = 1, ending: Ending = Ending.FLUSH
) -> PipelineOrder:
    codes = Codes(num_devices, num_microbatches)
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=num_devices,
        num_microbatches=num_microbatches,
        codes=tuple(_alternating(codes, device) for device in range(num_devices)),
        weight_versions=weight_versions,
        ending=ending,
    )


def _alternating(codes: Codes, device: int) -> list[int]:
    total = codes.num_microbatches
    warm_up = min(codes.num_chunks - 1 - device, total)
    forward, backward = codes.first(Kind.F, device), codes.first(Kind.BW, device)
    order = [*range(forward, forward + warm_up)] + [0] * (2 * (total - warm_up))
    order[warm_up::2] = range(forward + warm_up, forward + total)
    order[warm_up + 1 :: 2] = range(backward, backward + total - warm_up)
    order += range(backward + total - warm_up, backward + total)
    return order
