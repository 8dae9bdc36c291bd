"""What rounding an activation to a few bits takes on this machine, and bringing it back, measured in the training's own
process."""

from __future__ import annotations

import time
from statistics import median

import torch

from memadvisor.engines.rounded import Noise, restore, rounded

_ROUNDS = 7
_NUM_ELEMENTS = 2**17
_BITS = 4  # of 8 and 2 bits it takes about as long


def measure_rounding() -> tuple[float, float]:
    """Seconds an element, of rounding and of bringing back. Takes about 10 ms, draws none of the script's numbers.

    Medians, in seconds of this thread's CPU, which does all of it; the tensor is as large as no cache near a core.
    """
    device = torch.device("cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        values = torch.linspace(-1, 1, _NUM_ELEMENTS, device=device, dtype=torch.float32)
        noise, back = Noise(device, 0), torch.empty_like(values)
        rounding_s, restoring_s = [], []
        for _ in range(_ROUNDS):
            start_s = time.thread_time()
            packed = rounded(values, _BITS, noise)
            middle_s = time.thread_time()
            if packed is not None:
                restore(packed, back, _BITS)
            rounding_s.append(middle_s - start_s)
            restoring_s.append(time.thread_time() - middle_s)
    return median(rounding_s) / _NUM_ELEMENTS, median(restoring_s) / _NUM_ELEMENTS
