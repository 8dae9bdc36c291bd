"""Marks in time that cost no synchronisation: the monotonic clock on CPU, events on CUDA."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Mark(Protocol):
    """A moment on the device's timeline; `time_s` is None until the device has passed it."""

    @property
    def time_s(self) -> float | None: ...


class HostMark:
    __slots__ = ("time_s",)

    def __init__(self) -> None:
        self.time_s: float | None = time.monotonic()


class _DeviceMark:
    __slots__ = ("_clock", "_event", "_known_s")

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(clock.device))
        self._known_s: float | None = None

    @property
    def time_s(self) -> float | None:
        if self._known_s is None and self._event.query():  # type: ignore[no-untyped-call]
            self._known_s = self._clock.base_s + self._clock.base.elapsed_time(self._event) / 1e3
        return self._known_s


class HostClock:
    """Time as the CPU sees it, right where operators run synchronously."""

    def mark(self) -> Mark:
        return HostMark()


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

    def mark(self) -> Mark:
        return _DeviceMark(self)


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
