"""ZB-V (arXiv:2401.10241, section 6): two chunks a device, placed in a V, so that forwards end where they began.

Device d has chunks d and 2p-1-d. A microbatch's backward then starts where its forward started, and all devices hold
alike: at F = B = W the bubble is gone at 1F1B's peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from memadvisor.cost.pipelines.work import Codes, Ending, Kind, PipelineOrder, Work


def zb_v(num_devices: int, num_microbatches: int, chunks_per_device: int = 2) -> PipelineOrder:
    """The paper's pattern until the forwards of the first chunk end; from there what others wait for, and W fills."""
    codes = Codes(2 * num_devices, num_microbatches)
    devices = [
        _Device(
            down=device,
            up=2 * num_devices - 1 - device,
            script=list(_script(device, num_devices, num_microbatches)),
        )
        for device in range(num_devices)
    ]
    _play_units(devices, num_microbatches)
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=2 * num_devices,
        num_microbatches=num_microbatches,
        codes=tuple([codes.of(work) for work in device.order] for device in devices),
        ending=Ending.POST_VALIDATED,
    )


@dataclass(slots=True)
class _Device:
    down: int  # its chunk on the way down the V, and the one on the way up
    up: int
    script: list[Work]
    order: list[Work] = field(default_factory=list)


def _script(device: int, num_devices: int, num_microbatches: int) -> Iterator[Work]:
    """Warm-up, p-1-d groups F B W of the upper chunk, then groups of both in turn, until a forward is missing."""
    down, up = device, 2 * num_devices - 1 - device
    done = dict.fromkeys(((kind, chunk) for kind in Kind for chunk in (down, up)), 0)

    def pieces(chunk: int, kinds: tuple[Kind, ...]) -> Iterator[Work]:
        for kind in kinds:
            yield Work(kind, chunk, done[kind, chunk])
            done[kind, chunk] += 1

    alternating = [up, down] * num_microbatches
    for chunk in [down] * (2 * num_devices - 1 - 2 * device) + alternating[: 2 * device]:
        if done[Kind.F, chunk] == num_microbatches:
            return
        yield from pieces(chunk, (Kind.F,))
    for chunk in [up] * (num_devices - 1 - device) + alternating:
        if done[Kind.F, chunk] == num_microbatches:
            return
        yield from pieces(chunk, (Kind.F, Kind.B, Kind.W))


def _play_units(devices: list[_Device], num_microbatches: int) -> None:
    """All pieces take one unit; a device follows its script, then its rule."""
    num_chunks = 2 * len(devices)
    ended: dict[Work, int] = {}
    left = 3 * num_chunks * num_microbatches
    next_of = [dict.fromkeys(((k, c) for k in Kind for c in (d.down, d.up)), 0) for d in devices]
    now = 0
    while left:
        begun = []
        for device, following in zip(devices, next_of, strict=True):
            choices = (
                [device.script[len(device.order)]]
                if len(device.order) < len(device.script)
                else _by_rule(device, following, num_microbatches, num_chunks)
            )
            work = next((work for work in choices if _ready(work, ended, now, num_chunks)), None)
            if work is not None:
                device.order.append(work)
                following[work.kind, work.chunk] += 1
                begun.append(work)
        now += 1
        assert begun or now < 10 * num_chunks * num_microbatches, "the devices wait for each other"
        left -= len(begun)
        ended.update(dict.fromkeys(begun, now))


def _by_rule(
    device: _Device, following: dict[tuple[Kind, int], int], num_microbatches: int, most_held: int
) -> list[Work]:
    """What could come next, the best first; where 2p chunks' activations, or what W needs of them, are held, W soon."""
    down, up = device.down, device.up
    held = sum(following[Kind.F, chunk] - following[Kind.W, chunk] for chunk in (down, up))
    weights = [(Kind.W, up), (Kind.W, down)]
    if held < most_held:
        preferred = [(Kind.B, down), (Kind.F, up), (Kind.B, up), (Kind.F, down), *weights]
    else:
        preferred = [(Kind.B, down), *weights, (Kind.B, up)]
    return [
        Work(kind, chunk, following[kind, chunk])
        for kind, chunk in preferred
        if following[kind, chunk] < num_microbatches
    ]


def _ready(work: Work, ended: dict[Work, int], now: int, num_chunks: int) -> bool:
    kind, chunk, microbatch = work
    if kind is Kind.F:
        needed = Work(Kind.F, chunk - 1, microbatch) if chunk else None
    elif kind is Kind.W:
        needed = Work(Kind.B, chunk, microbatch)
    else:
        needed = (
            Work(Kind.B, chunk + 1, microbatch) if chunk < num_chunks - 1 else Work(Kind.F, chunk, microbatch)
        )
    return needed is None or ended.get(needed, now + 1) <= now
