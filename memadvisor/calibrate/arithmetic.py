"""How fast this machine multiplies matrices and moves memory, by running both."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from memadvisor.run.torch_names import dtype_name

# Matrix sides to try; the best rate counts, since a peak is what the machine can reach.
_SIDES = {"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)}
_BUDGET_S = 2.0  # for one dtype, or for the bandwidth
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
# Well past any cache, so that memory itself is measured.
_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}


def measure_flops(device: torch.device) -> dict[str, float]:
    """Best dense matmul FLOP/s by dtype name: 2 m n k for each product of m x k and k x n."""
    rates: dict[str, float] = {}
    for dtype in _DTYPES[device.type]:
        share_s = _BUDGET_S / len(_SIDES[device.type])
        rates[dtype_name(dtype)] = max(
            _matmul_flops(side, dtype, device, share_s) for side in _SIDES[device.type]
        )
    return rates


def _matmul_flops(side: int, dtype: torch.dtype, device: torch.device, budget_s: float) -> float:
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty(side, side, device=device, dtype=dtype)
    return 2 * side**3 / best_seconds(lambda: torch.mm(left, right, out=out), device, budget_s)


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, reading and writing counted, as STREAM's copy does."""
    source = torch.ones(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    size_bytes = 2 * source.numel() * source.element_size()
    return size_bytes / best_seconds(lambda: target.copy_(source), device, _BUDGET_S)


def best_seconds(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The shortest of repeated runs within a time budget, at least three, after one that does not count."""
    run()
    deadline_s = time.perf_counter() + budget_s
    best_s, count = float("inf"), 0
    while count < 3 or time.perf_counter() < deadline_s:
        _finish(device)
        start_s = time.perf_counter()
        run()
        _finish(device)
        best_s = min(best_s, time.perf_counter() - start_s)
        count += 1
    return best_s


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
