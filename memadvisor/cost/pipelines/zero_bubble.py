"""The two orders that split the backward, drawn by hand for F = B = W (arXiv:2401.10241, section 2).

Of a device's pieces, B is the one that another device waits for, so W stands back: it fills what would be idle at the
end, as far as memory lets it wait.
"""

from __future__ import annotations

from memadvisor.cost.pipelines.work import Codes, Ending, Kind, PipelineOrder


def zb_h1(num_devices: int, num_microbatches: int, chunks_per_device: int = 1) -> PipelineOrder:
    """ZB-H1: 1F1B's forwards; device d owes up to d weight gradients, which keeps every device within 1F1B's peak."""
    return _handcrafted(
        num_devices,
        num_microbatches,
        [num_devices - device for device in range(num_devices)],
        list(range(num_devices)),
    )


def zb_h2(num_devices: int, num_microbatches: int, chunks_per_device: int = 1) -> PipelineOrder:
    """ZB-H2: 2(p-d)-1 forwards first, and up to 2d weight gradients owed: a parallelogram without a bubble."""
    return _handcrafted(
        num_devices,
        num_microbatches,
        [2 * (num_devices - device) - 1 for device in range(num_devices)],
        [2 * device for device in range(num_devices)],
    )


def _handcrafted(
    num_devices: int, num_microbatches: int, forwards_first: list[int], owed: list[int]
) -> PipelineOrder:
    codes = Codes(num_devices, num_microbatches)
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=num_devices,
        num_microbatches=num_microbatches,
        codes=tuple(
            _device(codes, device, forwards_first[device], owed[device]) for device in range(num_devices)
        ),
        ending=Ending.POST_VALIDATED,
    )


def _device(codes: Codes, device: int, forwards_first: int, owed: int) -> list[int]:
    """Forwards, then B, W (once more are owed than may be) and F in turn, then B and W in turn, then the Ws left."""
    total = codes.num_microbatches
    forward, inputs, weights = (codes.first(kind, device) for kind in (Kind.F, Kind.B, Kind.W))
    begun = min(forwards_first, total)
    order = [*range(forward, forward + begun)]
    weighed = 0
    for done in range(1, total + 1):
        order.append(inputs + done - 1)
        # Without forwards left there is time for the weight gradients that are owed.
        if done - weighed > owed or begun == total:
            order.append(weights + weighed)
            weighed += 1
        if begun < total:
            order.append(forward + begun)
            begun += 1
    order += range(weights + weighed, weights + total)
    return order
