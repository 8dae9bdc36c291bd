"""How likely it is that a peak is beyond a device's memory.

Errors of predicted peaks are taken for log-normal. Parameters, gradients and optimizer state are known better than the rest is,
so a peak's spread hangs on their share of it.
"""

from __future__ import annotations

import math

from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.rank_memory import StageMemory

# What torch may have of a card over what its sheet says: 79.1 GiB of "80 GB", 39.5 of 40, 23.7 of 24 (its messages of
# memory that ran out; docs/cost-model.md).
_ON_CARD = 1.06


def chance_of_more(memory: StageMemory, capacity_bytes: float, coefficients: Coefficients) -> float:
    """That what a device holds is more than its memory."""
    states = memory.states_bytes / memory.allocated_bytes if memory.allocated_bytes else 0.0
    left_bytes = room_bytes(memory, capacity_bytes, coefficients)
    return chance_beyond(memory.needed_bytes, left_bytes, memory_sigma(states, coefficients))


def room_bytes(memory: StageMemory, capacity_bytes: float, coefficients: Coefficients) -> float:
    """What of a device's memory an allocator may have: what the sheet's leaves to a usual context, or to the smaller one of
    a job without communicators, and no more than the card has beside this job's own, which takes a larger part of a
    small card."""
    usual_bytes = min(coefficients.context_bytes, memory.context_bytes)
    return min(capacity_bytes - usual_bytes, _ON_CARD * capacity_bytes - memory.context_bytes)


def chance_beyond(peak_bytes: float, left_bytes: float, sigma: float) -> float:
    """That a peak predicted as `peak_bytes` is more than `left_bytes`."""
    if left_bytes <= 0:
        return 1.0
    return 0.5 * math.erfc(math.log(left_bytes / peak_bytes) / sigma / math.sqrt(2.0))


def memory_sigma(states: float, coefficients: Coefficients) -> float:
    """Standard deviation of the logarithm of measured over predicted peak, of which `states` is the share of parameters,
    gradients and optimizer state."""
    return math.hypot(coefficients.peak_sigma, coefficients.activations_sigma * (1.0 - states))


def safe_peak_bytes(
    states_bytes: float, left_bytes: float, max_p_oom: float, coefficients: Coefficients
) -> float:
    """The largest peak with such states whose chance of being more than `left_bytes` is accepted, by bisection."""
    low, high = 1.0, 2.0 * left_bytes
    for _ in range(60):
        middle = (low + high) / 2
        tensors = max(
            states_bytes, (middle - coefficients.allocator_fixed_bytes) / coefficients.allocator_share
        )
        sigma = memory_sigma(states_bytes / tensors if tensors > 0 else 0.0, coefficients)
        if chance_beyond(middle, left_bytes, sigma) < max_p_oom:
            low = middle
        else:
            high = middle
    return low
