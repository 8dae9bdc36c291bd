"""Marks in time that cost no synchronisation: seconds of the monotonic clock on CPU, events on CUDA.

And how far the monotonic clock is from the wall's, which torch's profiler and the label layer read.
"""

from __future__ import annotations

import time

import torch

_READINGS = 9


def monotonic_less_wall_ns() -> int:
    """What a wall-clock time needs added to be one of the monotonic clock.

    Of some readings the one that took least: on a busy machine a thread may wait for milliseconds between one clock
    and the other, which would shift a whole step against those of other ranks.
    """
    return min(_reading() for _ in range(_READINGS))[1]


def _reading() -> tuple[int, int]:
    """(how long it took, the difference)."""
    before_ns, wall_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return after_ns - before_ns, (before_ns + after_ns) // 2 - wall_ns


class DeviceMark:
    """A moment on the current CUDA stream. Its event is used again once nobody holds the mark. `host_s`: when the host asked
    for it, in seconds of the monotonic clock."""

    __slots__ = ("_clock", "_event", "host_s")

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self.host_s = time.monotonic()
        self._event = clock.record_event()

    def __del__(self) -> None:
        self._clock.free_events.append(self._event)

    def seconds(self) -> float | None:
        """Seconds of the monotonic clock; None until the device has passed the mark."""
        if not self._event.query():  # type: ignore[no-untyped-call]
            return None
        elapsed_ms: float = self._clock.base.elapsed_time(self._event)
        return self._clock.base_s + elapsed_ms / 1e3


class HostClock:
    """Time as the CPU sees it: right where operators run synchronously."""

    mark = staticmethod(time.monotonic)


class DeviceClock:
    """Time as the current CUDA stream sees it, on the axis of the monotonic clock.

    The axis is tied once, at construction, with the one synchronisation that memadvisor ever does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        self.base.record(torch.cuda.current_stream(device))
        torch.cuda.synchronize(device)
        self.base_s = time.monotonic()
        self.free_events: list[torch.cuda.Event] = []
        self._streams: dict[
            tuple[int, int, int], torch.cuda.Stream
        ] = {}  # by what torch tells of the current one

    def record_event(self) -> torch.cuda.Event:
        """One recorded now. In a step of nothing but launches, making an event and a stream's object for each mark would
        take some hundredths of it."""
        event = self.free_events.pop() if self.free_events else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        key = torch._C._cuda_getCurrentStream(self.device.index)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(self.device)
        event.record(stream)
        return event

    def mark(self) -> DeviceMark:
        return DeviceMark(self)


def lag_s(mark: float | DeviceMark, passed_s: float) -> float | None:
    """How far the device was behind the host at a mark that it has passed then; None on the host."""
    return None if isinstance(mark, float) else max(0.0, passed_s - mark.host_s)


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def seconds_of(mark: float | DeviceMark) -> float | None:
    """When the mark was passed; None if the device has not come that far."""
    return mark if isinstance(mark, float) else mark.seconds()
