"""What rounding an activation to a few bits takes on this machine, and bringing it back, measured in the training's own
process."""

from __future__ import annotations

import time
from statistics import median

import torch

from memadvisor.engines.activations.rounded import Noise, restore, rounded

_ROUNDS = 5
_FEW, _MANY = 2**15, 2**18  # elements
_PASSED_BYTES = 2**23  # passed over before each, as a training's operators do: its caches are cold
_BITS = 4  # of 8 and 2 bits it takes about as long


def measure_rounding() -> tuple[float, float, float, float]:
    """Seconds of rounding a tensor, and each of its elements; the same of bringing one back. Takes about 60 ms, draws none
    of the script's numbers.

    A tensor of n elements takes tensor_s + n * element_s: of two values of n, medians, in seconds of this thread's CPU,
    which does all of it.
    """
    device = torch.device("cpu")
    passed = torch.zeros(_PASSED_BYTES // 4, device=device, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        few, many = (_measured(count, passed) for count in (_FEW, _MANY))
    return *_line(few[0], many[0]), *_line(few[1], many[1])


def _line(few_s: float, many_s: float) -> tuple[float, float]:
    element_s = max(0.0, (many_s - few_s) / (_MANY - _FEW))
    return max(0.0, few_s - _FEW * element_s), element_s


def _measured(count: int, passed: torch.Tensor) -> tuple[float, float]:
    values = torch.linspace(-1, 1, count, device=passed.device, dtype=torch.float32)
    noise = Noise(passed.device, 0)
    rounding_s, restoring_s, kept = [], [], []
    for _ in range(_ROUNDS):
        passed.add_(1.0)
        start_s = time.thread_time()
        packed = rounded(values, _BITS, noise)
        rounding_s.append(time.thread_time() - start_s)
        if packed is None:
            raise AssertionError("these have a range")
        kept.append(packed)  # a training keeps them too: the next ones are in memory of their own
        passed.add_(1.0)
        start_s = time.thread_time()
        restore(packed, torch.empty_like(values), _BITS)
        restoring_s.append(time.thread_time() - start_s)
    return median(rounding_s), median(restoring_s)
