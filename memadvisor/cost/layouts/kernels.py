"""How long one kernel takes on a device: products by their shape, everything else by the bytes it moves (roofline:
Williams, Waterman and Patterson 2009)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.errors import UsageError
from memadvisor.hardware.catalogue import find_entry
from memadvisor.hardware.hardware import Hardware
from memadvisor.software_traits import NARROW

# Of rates that `memadvisor calibrate` measured: what products of a step reach of the best one alone, as of cards whose best
# product is known (the catalogue's shares), and what a copy reaches of the bandwidth that a sheet names, of which
# `bandwidth_share` is.
_BEST_PRODUCT_SHARE, _COPY_SHARE = 0.93, 0.88


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The rates that count of an accelerator, for one compute dtype. `wide_flops_per_s`: of what stays in 16 bits where
    products are in fewer (attention and the head, for one); the peak itself otherwise. `plain_flops_per_s`: of products
    that its tensor cores do not take, None where it is not known. `own_matmul_share`: in place of the coefficients', where the
    catalogue has one of the card, and `own_narrow_share` of products in fewer bits. `element_bytes`: of what products read and write.
    """

    peak_flops_per_s: float
    wide_flops_per_s: float
    plain_flops_per_s: float | None
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    coefficients: Coefficients
    own_matmul_share: float | None = None
    own_narrow_share: float | None = None
    element_bytes: float = 2.0

    @property
    def is_narrow(self) -> bool:
        """Products have operands of fewer than 16 bits, which are cast for them."""
        return self.peak_flops_per_s != self.wide_flops_per_s

    @property
    def wide(self) -> Device:
        """The same device where it computes in 16 bits."""
        return replace(self, peak_flops_per_s=self.wide_flops_per_s)

    @property
    def is_fast(self) -> bool:
        """Power limits its 16-bit products, from Hopper on."""
        return self.wide_flops_per_s > self.coefficients.fast_flops_per_s

    @property
    def matmul_share(self) -> float:
        if self.is_narrow and self.own_narrow_share is not None:
            return self.own_narrow_share
        if self.own_matmul_share is not None:
            return self.own_matmul_share
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
    rates = hardware.peak_flops_per_s
    narrow = compute_dtype.startswith(NARROW)
    is_measured = hardware.kind == "measured"
    share, narrow_share = _own_shares(hardware)
    return Device(
        peak_flops_per_s=peak,
        wide_flops_per_s=rates.get("bfloat16", peak) if narrow else peak,
        plain_flops_per_s=rates.get("float32"),
        memory_bandwidth_bytes_per_s=hardware.memory_bandwidth_bytes_per_s
        / (_COPY_SHARE if is_measured else 1.0),
        memory_bytes=hardware.memory_bytes,
        coefficients=coefficients,
        element_bytes=4.0 if compute_dtype in ("float32", "tf32") else 2.0,
        own_matmul_share=share,
        own_narrow_share=narrow_share,
    )


def _own_shares(hardware: Hardware) -> tuple[float | None, float | None]:
    """Of products, and of those of 8 bits and fewer where that is another."""
    if hardware.kind == "measured":
        return _BEST_PRODUCT_SHARE, None
    return _shares_of_catalogue(hardware.name) if hardware.kind == "datasheet" else (None, None)


@lru_cache(maxsize=256)
def _shares_of_catalogue(name: str) -> tuple[float | None, float | None]:
    entry = find_entry(name)
    return (None, None) if entry is None else (entry.matmul_share, entry.narrow_matmul_share)


def matmul_seconds(device: Device, rows: float, columns: float, depth: float, count: float = 1.0) -> float:
    """`count` products (rows x depth) @ (depth x columns), launched as one kernel."""
    known = device.coefficients
    arithmetic = 2.0 * rows * columns * depth * count / (device.peak_flops_per_s * device.matmul_share)
    elements = (rows * depth + depth * columns + rows * columns) * count
    return max(arithmetic, stream_seconds(device, device.element_bytes * elements)) + known.matmul_fixed_s


def unaligned_matmul_seconds(
    device: Device, rows: float, columns: float, depth: float, count: float = 1.0
) -> float:
    """Such products where rows of a matrix do not begin at multiples of 16 bytes: tensor cores do not take them, and they
    run at the rate of float32 (NVIDIA, Matrix Multiplication Background, tensor core requirements).
    """
    plain = device.plain_flops_per_s or device.peak_flops_per_s
    return matmul_seconds(replace(device, peak_flops_per_s=plain), rows, columns, depth, count)


def stream_seconds(device: Device, moved_bytes: float) -> float:
    """A kernel that reads and writes `moved_bytes` in all, without its launch."""
    return moved_bytes / (device.memory_bandwidth_bytes_per_s * device.coefficients.bandwidth_share)


_HOPPER_FLOPS_PER_S = 989e12  # of an H100's sheet, dense, in 16 bits


def fused_attention_seconds(
    device: Device, flops: float, speed: float = 1.0, *, is_as_on_hopper: bool = False
) -> float:
    """The forward of attention whose scores stay on the chip (Dao 2023, arXiv:2307.08691), in 16 bits. `speed`: of kernels
    written for a fast card, over those that were not."""
    wide = device.wide
    if is_as_on_hopper:
        wide = replace(wide, peak_flops_per_s=min(wide.peak_flops_per_s, _HOPPER_FLOPS_PER_S))
    rate = wide.peak_flops_per_s * wide.matmul_share * device.coefficients.attention_share
    return flops / (rate * (speed if device.is_fast else 1.0))
