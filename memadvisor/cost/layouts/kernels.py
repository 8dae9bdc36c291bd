"""How long one kernel takes on a device: products by their shape, everything else by the bytes it moves (roofline:
Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The rates that count of an accelerator, for one compute dtype."""

    peak_flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    coefficients: Coefficients

    @property
    def matmul_share(self) -> float:
        known = self.coefficients
        fast = self.peak_flops_per_s > known.fast_flops_per_s
        return known.matmul_share_fast if fast else known.matmul_share


def device_of(hardware: Hardware, compute_dtype: str, coefficients: Coefficients) -> Device:
    """Raises UsageError where a figure that the prediction needs is unknown."""
    peak = hardware.peak_flops_per_s.get(compute_dtype)
    if peak is None:
        known = ", ".join(sorted(hardware.peak_flops_per_s)) or "none"
        raise UsageError(
            f"how fast {hardware.name} is in {compute_dtype} is not known.",
            hint=f"known are {known}; `memadvisor calibrate -o hardware.json` measures a machine.",
        )
    for field in ("memory_bandwidth_bytes_per_s", "memory_bytes"):
        if getattr(hardware, field) is None:
            raise UsageError(
                f"{field} of {hardware.name} is not known.", hint="give a hardware file that has it."
            )
    assert hardware.memory_bandwidth_bytes_per_s is not None and hardware.memory_bytes is not None
    return Device(
        peak_flops_per_s=peak,
        memory_bandwidth_bytes_per_s=hardware.memory_bandwidth_bytes_per_s,
        memory_bytes=hardware.memory_bytes,
        coefficients=coefficients,
    )


def matmul_seconds(device: Device, rows: float, columns: float, depth: float, count: float = 1.0) -> float:
    """`count` products (rows x depth) @ (depth x columns) of two-byte elements, launched as one kernel."""
    known = device.coefficients
    arithmetic = 2.0 * rows * columns * depth * count / (device.peak_flops_per_s * device.matmul_share)
    elements = (rows * depth + depth * columns + rows * columns) * count
    return max(arithmetic, stream_seconds(device, 2.0 * elements)) + known.matmul_fixed_s


def stream_seconds(device: Device, moved_bytes: float) -> float:
    """A kernel that reads and writes `moved_bytes` in all, without its launch."""
    return moved_bytes / (device.memory_bandwidth_bytes_per_s * device.coefficients.bandwidth_share)


def fused_attention_seconds(device: Device, flops: float) -> float:
    """The forward of attention whose scores stay on the chip (Dao 2023, arXiv:2307.08691)."""
    return flops / (device.peak_flops_per_s * device.matmul_share * device.coefficients.attention_share)
