"""Seconds of a captured unit on another device, and of collectives among ranks of a measured machine.

On the device that was recorded a unit takes its measured seconds, in proportion to the samples of its micro-batch. On
another one these are scaled by the ratio of what the two rooflines allow at least (Williams, Waterman and Patterson 2009),
forward and backward of each unit by themselves; so a unit reaches the same share of its roof there. That share is a guess
from one device to another, the more so from a CPU to a GPU. A unit is no faster than its operators can be launched.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memadvisor.cost.captured_units import CapturedModel, Pass
from memadvisor.cost.collectives import CollectiveTimes, times_from_curves
from memadvisor.cost.layouts.coefficients import FITTED, Coefficients
from memadvisor.cost.layouts.kernels import Device, device_of
from memadvisor.cost.layouts.links import Group, group_of
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.load import named_hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGroup(Group):
    """Ranks whose collectives were measured (`memadvisor calibrate`): their curves in place of a link's rate."""

    times: CollectiveTimes

    def seconds(self, operation: str, size_bytes: float, messages: float = 1) -> float:
        if size_bytes <= 0:
            return 0.0
        return messages * self.times.seconds(operation, size_bytes / messages, self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The two roofs of a device: of products in the run's dtype, and of its memory."""

    peak_flops_per_s: float
    memory_bandwidth_bytes_per_s: float

    def least_seconds(self, done: Pass) -> float:
        moved_s = (done.moved_bytes or 0) / self.memory_bandwidth_bytes_per_s
        return max(done.flops / self.peak_flops_per_s, moved_s)


def roofline_of(hardware: Hardware, dtype: str) -> Roofline:
    """Raises UsageError where a roof is not known."""
    peak, bandwidth = hardware.peak_flops_per_s.get(dtype), hardware.memory_bandwidth_bytes_per_s
    if peak is None or bandwidth is None:
        what = f"how fast {hardware.name} is in {dtype}" if peak is None else f"{hardware.name}'s memory rate"
        raise UsageError(
            f"{what} is not known, so times cannot be scaled.",
            hint="`memadvisor calibrate -o hardware.json` measures a machine.",
        )
    return Roofline(peak_flops_per_s=peak, memory_bandwidth_bytes_per_s=bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The cluster to lay out for. `roofs`: of the device that the run was made on, and of the cluster's; None where they
    are the same, so that measured times stand as they are. `times`: measured collectives of one machine, None for links.
    """

    cluster: Cluster
    device: Device
    roofs: tuple[Roofline, Roofline] | None
    times: CollectiveTimes | None

    @property
    def coefficients(self) -> Coefficients:
        return self.device.coefficients

    def group(self, size: int, stride: int) -> Group:
        if self.times is None or size == 1:
            return group_of(self.cluster, size, stride, self.coefficients)
        return MeasuredGroup(
            size=size, near=size, nodes=1, bytes_per_s=0.0, exchange_bytes_per_s=0.0, own_bytes_per_s=0.0, ring_latency_s=0.0,
            tree_latency_s=0.0, tree_share=1.0,
            call_s=0.0, times=self.times,
        )  # fmt: skip

    def pass_seconds(self, done: Pass, share: float) -> float:
        """Of a forward or backward with `share` times the samples of the recorded micro-batch."""
        if self.roofs is None:
            return done.seconds * share
        recorded, here = self.roofs
        least_s = recorded.least_seconds(done)
        ratio = here.least_seconds(done) / least_s if least_s > 0 else self._streams_ratio(self.roofs)
        launches_s = done.num_operators * self.coefficients.kernel_s
        return max(done.seconds * share * ratio, launches_s)

    def stream_seconds(self, seconds: float) -> float:
        """Of what moves bytes and does next to no arithmetic, as an optimizer."""
        return seconds if self.roofs is None else seconds * self._streams_ratio(self.roofs)

    @staticmethod
    def _streams_ratio(roofs: tuple[Roofline, Roofline]) -> float:
        return roofs[0].memory_bandwidth_bytes_per_s / roofs[1].memory_bandwidth_bytes_per_s


def target_of(model: CapturedModel, cluster: Cluster, recorded_on: Hardware | None) -> Target:
    """Raises UsageError where a rate that the scaling needs is not known."""
    accelerator = cluster.accelerator
    if model.dtype is None:
        raise UsageError(
            "The run has no product of known dtype, so no rate of a device can be told.",
            hint="profile for more steps: the traced one comes after the warm-up.",
        )
    coefficients = _coefficients(accelerator)
    device = device_of(accelerator, model.dtype, coefficients)
    times = None
    if accelerator.collectives and cluster.num_nodes == 1 and cluster.per_node > 1:
        times = times_from_curves(accelerator.collectives, cluster.per_node, accelerator.source)
    known = named_hardware(model.device_name)
    own_name = model.device_name if known is None else known.name
    if accelerator.name == own_name:
        return Target(cluster=cluster, device=device, roofs=None, times=times)
    recorded = recorded_on or known
    if recorded is None:
        raise UsageError(
            f"The run was recorded on {model.device_name!r}, whose rates are not known, so its times cannot be scaled to"
            f" {accelerator.name}.",
            hint="measure that machine with `memadvisor calibrate -o recorded.json`, and add --hardware recorded.json.",
        )
    return Target(
        cluster=cluster,
        device=device,
        roofs=(roofline_of(recorded, model.dtype), roofline_of(accelerator, model.dtype)),
        times=times,
    )


def is_host(accelerator: Hardware) -> bool:
    """A machine that `memadvisor calibrate` measured without a GPU: its ranks share its memory and cores."""
    return accelerator.kind == "measured" and accelerator.host is None


def _coefficients(accelerator: Hardware) -> Coefficients:
    """On a host no allocator keeps fragments and no driver takes memory; what overlap costs was measured."""
    if not is_host(accelerator):
        return FITTED
    slowdown = FITTED.overlap_slowdown
    if accelerator.overlap is not None:
        slowdown = max(accelerator.overlap.compute, accelerator.overlap.collective) - 1.0
    return replace(
        FITTED,
        allocator_share=1.0,
        allocator_fixed_bytes=0.0,
        driver_bytes=0.0,
        communicator_bytes=0.0,
        context_bytes=0.0,
        overlap_slowdown=slowdown,
    )
