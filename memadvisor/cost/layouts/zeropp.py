"""Seconds of one microbatch's collectives of ZeRO stage 3, with the options of ZeRO++ (Wang et al. 2023, arXiv:2306.10209).

qwZ (section 3.1): a forward's gather carries 8 bits of each parameter. hpZ (3.2): a backward's gather stays among ranks that
share a second copy. qgZ (3.3): gradients are reduced by two all-to-alls of 4 bits each, inside the node and between nodes,
in place of a ring. Every collective is one of each unit. Per step and byte of 16-bit parameters, nodes exchange 3 without
and 1/2 + 0 + 1/4 with all of them. The kernels that quantise are not priced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from memadvisor.cost.layouts.links import Group
from memadvisor.layout import TrainingStep
from memadvisor.software_traits import Software

# A block's scale is of fp32; DeepSpeed's blocks have 4,000 to 8,000 elements (its CUDAQuantizer).
_SCALE_BYTES = 4 / 4096
QUANTIZED_WEIGHT_BYTES = 1 + _SCALE_BYTES
QUANTIZED_GRADIENT_BYTES = 0.5 + _SCALE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Hops:
    """`whole` shares shards: `inside` are its ranks in one node, `across` one of each node. `secondary` shares hpZ's copy."""

    whole: Group
    inside: Group
    across: Group
    secondary: Group


def hops_of(whole: Group, group: Callable[[int, int], Group], apart: int, secondary: int) -> Hops:
    """`whole` has ranks that are `apart`; `secondary`: how many share hpZ's copy. `group`: of so many ranks, so far apart."""
    near = gcd(whole.size, whole.near)
    return Hops(
        whole=whole,
        inside=group(near, apart),
        across=group(whole.size // near, apart * near),
        secondary=group(secondary, apart),
    )


def forward_gather_seconds(step: TrainingStep, hops: Hops, parameters: float, units: float) -> float:
    size = _gathered_bytes(step)
    if step.layout.quantized_weights:
        size = min(size, QUANTIZED_WEIGHT_BYTES)
    return hops.whole.seconds("all_gather", parameters * size, units)


def backward_gather_seconds(step: TrainingStep, hops: Hops, parameters: float, units: float) -> float:
    group = hops.whole if step.layout.secondary_shard is None else hops.secondary
    return group.seconds("all_gather", parameters * _gathered_bytes(step), units)


def _gathered_bytes(step: TrainingStep) -> float:
    """Of a parameter on the wire, unless it is quantised for it."""
    software = step.software
    return updated_bytes(software) if software.lora is None else software.lora.matrix_bytes


def updated_bytes(software: Software) -> float:
    """Of a parameter that is trained, on the wire."""
    narrow = software.gathers_narrow and software.is_narrow and software.lora is None
    return 1.0 if narrow else software.parameter_bytes


def reduce_seconds(step: TrainingStep, hops: Hops, parameters: float, units: float) -> float:
    """Of gradients. After the first hop a rank holds the node's sum of its part, quantised anew for the second."""
    size: float = step.software.reduce_bytes
    if not step.layout.quantized_gradients:
        return hops.whole.seconds("reduce_scatter", parameters * size, units)
    size = min(size, QUANTIZED_GRADIENT_BYTES)
    first = hops.inside.exchange_seconds(parameters * size, units)
    return first + hops.across.exchange_seconds(parameters * size / hops.inside.size, units)
