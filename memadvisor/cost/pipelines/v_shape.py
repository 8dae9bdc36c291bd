"""ZB-V (arXiv:2401.10241, section 6): two chunks a device, placed in a V, so that forwards end where they began.

Device d has chunks d and 2p-1-d. A microbatch's backward then starts where its forward started, and all devices hold
alike: at F = B = W the bubble is gone at 1F1B's peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from memadvisor.cost.pipelines.work import Codes, Ending, Kind, PipelineOrder


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
    _Units(devices, num_microbatches).play()
    return PipelineOrder(
        num_devices=num_devices,
        num_chunks=2 * num_devices,
        num_microbatches=num_microbatches,
        codes=tuple(
            [codes.first(Kind(kind), chunk) + microbatch for kind, chunk, microbatch in device.order]
            for device in devices
        ),
        ending=Ending.POST_VALIDATED,
    )


_F, _B, _W = int(Kind.F), int(Kind.B), int(Kind.W)  # plain numbers, which index faster
_Next = tuple[int, int]  # of which kind and chunk


@dataclass(slots=True)
class _Device:
    down: int  # its chunk on the way down the V, and the one on the way up
    up: int
    script: list[_Next]
    order: list[tuple[int, int, int]] = field(default_factory=list)  # kind, chunk, microbatch


def _script(device: int, num_devices: int, num_microbatches: int) -> Iterator[_Next]:
    """Warm-up, p-1-d groups F B W of the upper chunk, then groups of both in turn, until a forward is missing."""
    down, up = device, 2 * num_devices - 1 - device
    left = {down: num_microbatches, up: num_microbatches}
    alternating = [up, down] * num_microbatches
    for chunk in [down] * (2 * num_devices - 1 - 2 * device) + alternating[: 2 * device]:
        if not left[chunk]:
            return
        left[chunk] -= 1
        yield _F, chunk
    for chunk in [up] * (num_devices - 1 - device) + alternating:
        if not left[chunk]:
            return
        left[chunk] -= 1
        yield from ((_F, chunk), (_B, chunk), (_W, chunk))


class _Units:
    """All pieces take one unit; a device follows its script, then its rule."""

    def __init__(self, devices: list[_Device], num_microbatches: int) -> None:
        self.devices, self.total = devices, num_microbatches
        self.num_chunks = 2 * len(devices)
        # By kind and chunk: how many pieces have begun, and when each ends; one more than there are, of which none does.
        self.done = [[0] * self.num_chunks for _ in (_F, _B, _W)]
        self.never = 10 * self.num_chunks * num_microbatches
        none = [self.never] * (num_microbatches + 1)
        self.ended = [[none.copy() for _ in range(self.num_chunks)] for _ in (_F, _B)]

    def play(self) -> None:
        left, now = 3 * self.num_chunks * self.total, 0
        while left:
            begun = 0
            for device in self.devices:
                order, script = device.order, device.script
                choices = [script[len(order)]] if len(order) < len(script) else self._by_rule(device)
                for kind, chunk in choices:
                    if self._is_ready(kind, chunk, now):
                        microbatch = self.done[kind][chunk]
                        self.done[kind][chunk] += 1
                        if kind != _W:  # a device looks at what ended before now alone
                            self.ended[kind][chunk][microbatch] = now + 1
                        order.append((kind, chunk, microbatch))
                        begun += 1
                        break
            now += 1
            assert begun or now < self.never, "the devices wait for each other"
            left -= begun

    def _by_rule(self, device: _Device) -> tuple[_Next, ...]:
        """What could come next, the best first; where 2p chunks' activations, or what W needs of them, are held, W soon."""
        down, up = device.down, device.up
        forwards, weights = self.done[_F], self.done[_W]
        if forwards[down] + forwards[up] - weights[down] - weights[up] < self.num_chunks:
            return (_B, down), (_F, up), (_B, up), (_F, down), (_W, up), (_W, down)
        return (_B, down), (_W, up), (_W, down), (_B, up)

    def _is_ready(self, kind: int, chunk: int, now: int) -> bool:
        """Whether the next piece of that kind, where there is one, has what it needs."""
        microbatch = self.done[kind][chunk]
        if microbatch == self.total:
            return False
        if kind == _F:
            return chunk == 0 or self.ended[_F][chunk - 1][microbatch] <= now
        if kind == _W:
            return self.ended[_B][chunk][microbatch] <= now
        if chunk < self.num_chunks - 1:
            return self.ended[_B][chunk + 1][microbatch] <= now
        return self.ended[_F][chunk][microbatch] <= now
