"""What the allocator, the device and the process say of themselves, read when a step ends."""

from __future__ import annotations

import torch

from memadvisor.capture.allocator import RunningPeak, counter, device_totals, open_nvml
from memadvisor.capture.census import residents
from memadvisor.capture.cpu_account import CpuAccount, open_cpu_account
from memadvisor.capture.truth import is_profiler_free
from memadvisor.run.records import Counter

_COUNT_EVERY_S = 0.1


class Gauges:
    """`cpu` is the CPU allocator's account while it is open; `device` is whose allocator the peaks are of.

    Where that is a GPU's, the CPU's account is of no use but one: with none, torch says on stderr that a profiler does not
    know how large a block is that was there before it, for a batch of the script's as a rule.
    """

    def __init__(self) -> None:
        alive = residents((), torch.device("cpu"))
        self.cpu = open_cpu_account((block.address, block.size_bytes) for block in alive)
        self.device, self._is_on_gpu = torch.device("cpu"), False
        self.nvml: object | None = None
        self.allocated_bytes: int | None = None
        self.peaks: tuple[int | None, int | None] = None, None
        self._running_peak = RunningPeak()
        self._last_counter_s = 0.0

    def meet(self, device: torch.device) -> None:
        """The model is on this CUDA device."""
        self.device, self._is_on_gpu = device, True
        self.nvml = open_nvml(device)

    @property
    def device_account(self) -> CpuAccount | None:
        """The CPU allocator's account where the model is on the CPU."""
        return self.cpu if self.device.type == "cpu" else None

    def read(self, now_s: float) -> Counter | None:
        """The step has ended: set `allocated_bytes` and `peaks` (allocated, reserved); a counter's row now and then."""
        totals = device_totals(self.device) if self._is_on_gpu else None
        if totals is not None:
            self.allocated_bytes = totals.allocated_bytes
        else:
            self.allocated_bytes = self.cpu.allocated_bytes() if self.cpu else None
        self.peaks = self._running_peak.of_step(totals)
        if now_s - self._last_counter_s < _COUNT_EVERY_S:
            return None
        self._last_counter_s = now_s
        return counter(now_s, self.allocated_bytes, totals, self.nvml)

    def close_cpu_account(self) -> None:
        cpu, self.cpu = self.cpu, None
        if cpu is not None:
            # A profiler of the script's would take what is forgotten here for frees.
            alive = residents((), torch.device("cpu"), cpu) if is_profiler_free() else []
            cpu.close(block.address for block in alive)
