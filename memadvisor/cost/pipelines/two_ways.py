"""Two pipelines through the same devices in opposite directions, each with its own copy of the weights.

Device d is stage d of the one and stage p-1-d of the other, so that the one's idle start and end are the other's work.
DualPipeV has half of such devices: the way back is the second half of the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from memadvisor.cost.pipelines.work import Codes, Kind, PipelineOrder, Work


def chimera(num_devices: int, num_microbatches: int, chunks_per_device: int = 1) -> PipelineOrder:
    """Chimera (arXiv:2107.06925) with two pipelines and units of p microbatches one behind the other.

    With forwards and backwards of one length, microbatch j of a unit's p/2 is forwarded by stage s at s+2j and goes
    back at 2p-1-s+2j, the other direction's fall between, and the next unit begins 2p later: that is the order.
    """
    codes = Codes(num_devices, num_microbatches)
    orders = []
    for device in range(num_devices):
        slots: list[tuple[int, int]] = []
        for microbatch in range(num_microbatches):
            unit, place = divmod(microbatch, num_devices)
            downwards = (min(num_devices, num_microbatches - unit * num_devices) + 1) // 2
            upwards = place >= downwards
            round_of = place - downwards if upwards else place
            stage = num_devices - 1 - device if upwards else device
            begin = 2 * num_devices * unit + 2 * round_of
            slots.append((begin + stage, codes.first(Kind.F, stage) + microbatch))
            slots.append((begin + 2 * num_devices - 1 - stage, codes.first(Kind.BW, stage) + microbatch))
        orders.append([code for _, code in sorted(slots)])
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=num_devices,
        num_microbatches=num_microbatches,
        codes=tuple(orders),
        weight_copies=2,
    )


def dualpipe(num_devices: int, num_microbatches: int, chunks_per_device: int = 1) -> PipelineOrder:
    """DualPipe (arXiv:2412.19437, section 3.2.1): half the microbatches start at either end.

    In its main part a device computes one direction's forward and the other's backward as one piece, which hides
    their all-to-all: it begins when both inputs are there, takes the two's times, and ends with both results.
    """
    half = num_microbatches // 2
    codes = Codes(num_devices, num_microbatches)
    orders = []
    together: set[int] = set()
    for device in range(num_devices):
        # Seen from the nearer end, all devices do alike; microbatches come from there (near) or from the other end.
        nearer = min(device, num_devices - 1 - device)
        ends = (0, half) if device < num_devices // 2 else (half, 0)
        near, far = (device if first == 0 else num_devices - 1 - device for first in ends)
        orders.append(
            _both_ways(codes, together, _dualpipe_pieces(nearer, num_devices, half), (near, far), ends)
        )
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=num_devices,
        num_microbatches=num_microbatches,
        codes=tuple(orders),
        weight_copies=2,
        together=frozenset(together),
    )


def dualpipe_v(num_devices: int, num_microbatches: int, chunks_per_device: int = 2) -> PipelineOrder:
    """DualPipeV (github.com/deepseek-ai/DualPipe, dualpipev.py): the first p of DualPipe's 2p devices, with one copy of the
    weights. Device d has chunks d and 2p-1-d, and what comes from the far end is what it sent on its way down the V.
    """
    codes = Codes(2 * num_devices, num_microbatches)
    together: set[int] = set()
    orders = [
        _both_ways(
            codes,
            together,
            _dualpipe_pieces(device, 2 * num_devices, num_microbatches),
            (device, 2 * num_devices - 1 - device),
            (0, 0),
        )
        for device in range(num_devices)
    ]
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=2 * num_devices,
        num_microbatches=num_microbatches,
        codes=tuple(orders),
        together=frozenset(together),
    )


NEAR, FAR = 0, 1


def _both_ways(
    codes: Codes,
    together: set[int],
    pieces: Iterator[tuple[Kind, int, bool]],
    chunks: tuple[int, int],
    firsts: tuple[int, int],
) -> list[int]:
    """A device's order: `chunks` and the first microbatch of the near way and the far one. Adds to `together`."""
    following = {(kind, way): 0 for kind in ("F", "B", "W") for way in (NEAR, FAR)}
    order: list[int] = []
    for kind, way, as_one in pieces:
        role = "B" if kind is Kind.BW else kind.name
        microbatch = firsts[way] + following[role, way]
        following[role, way] += 1
        order.append(codes.of(Work(kind, chunks[way], microbatch)))
        if as_one:
            together.add(order[-1])
        if kind is Kind.BW:
            following["W", way] += 1
    return order


def _dualpipe_pieces(nearer: int, num_devices: int, half: int) -> Iterator[tuple[Kind, int, bool]]:
    """The pieces of the device that is `nearer` places from its end: (kind, way, whether the next one runs with it)."""
    inner = num_devices // 2 - 1 - nearer  # devices between it and the middle
    owed: list[int] = []  # the ways of the weight gradients that were put off

    def backward(way: int, put_off: bool) -> tuple[Kind, int, bool]:
        if put_off:
            owed.append(way)
        return (Kind.B if put_off else Kind.BW), way, False

    yield from [(Kind.F, NEAR, False)] * (2 * inner)
    yield from [(Kind.F, NEAR, False), (Kind.F, FAR, False)] * (nearer + 1)
    for _ in range(inner):
        yield backward(FAR, True)
        yield Kind.W, owed.pop(0), False
        yield Kind.F, FAR, False
    for turn in range(half - num_devices + nearer + 1):
        # The two in the middle do not join their first two: the backward would only start later.
        yield Kind.F, NEAR, turn > 0 or inner > 0
        yield backward(FAR, False)
        yield Kind.F, FAR, True
        yield backward(NEAR, False)
    for _ in range(inner):
        yield backward(FAR, False)
        yield Kind.F, FAR, True
        yield backward(NEAR, False)
    # In the second half of these the weight gradients are put off, to fill what comes after.
    for piece in range(2 * (nearer + 1)):
        yield backward(FAR if piece % 2 == 0 else NEAR, piece >= nearer + 1)
    for _ in range(inner):
        yield Kind.W, owed.pop(0), False
        yield backward(NEAR, True)
    while owed:
        yield Kind.W, owed.pop(0), False
