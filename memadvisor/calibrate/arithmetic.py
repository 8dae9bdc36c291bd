"""How fast this machine multiplies matrices and moves memory, by running both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from memadvisor.hardware.hardware import MatmulRate, OptimizerRate
from memadvisor.run.torch_names import dtype_name

# Rows, columns and depth of products: squares, and a layer of few tokens, of many, and with a narrow head. Overheads hold
# small ones down, memory holds the flat ones.
_SHAPES = {
    "cpu": (
        *((side, side, side) for side in (64, 128, 256, 512, 1024)),
        *((16, 1024, 256), (128, 1024, 256), (1024, 1024, 256), (1024, 256, 1024), (1024, 64, 256)),
    ),
    "cuda": (
        *((side, side, side) for side in (512, 1024, 2048, 4096, 8192)),
        *((16, 16384, 4096), (512, 16384, 4096), (8192, 16384, 4096), (8192, 4096, 16384), (8192, 128, 4096)),
    ),
}
_BUDGET_S = 2.0  # for one dtype, or for the bandwidth
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
# Well past any cache, so that memory itself is measured.
_COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
_OPTIMIZER_SHAPES = {"cpu": (1024, 4, 1024), "cuda": (4096, 4, 4096)}  # rows, how many matrices, columns


def measure_matmuls(device: torch.device) -> tuple[MatmulRate, ...]:
    """The best rate of each shape and dtype."""
    shapes = _SHAPES[device.type]
    return tuple(
        MatmulRate(
            dtype=dtype_name(dtype),
            rows=rows,
            columns=columns,
            depth=depth,
            flops_per_s=_matmul_flops(rows, columns, depth, dtype, device, _BUDGET_S / len(shapes)),
        )
        for dtype in _DTYPES[device.type]
        for rows, columns, depth in shapes
    )


def peak_flops(rates: Sequence[MatmulRate]) -> dict[str, float]:
    """The best rate of any shape, by dtype name: a peak is what the machine can reach."""
    return {
        dtype: max(rate.flops_per_s for rate in rates if rate.dtype == dtype)
        for dtype in dict.fromkeys(rate.dtype for rate in rates)
    }


def _matmul_flops(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, budget_s: float
) -> float:
    left = torch.randn(rows, depth, device=device).to(dtype)
    right = torch.randn(depth, columns, device=device).to(dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    seconds = best_seconds(lambda: torch.mm(left, right, out=out), device, budget_s)
    return 2 * rows * columns * depth / seconds


def measure_optimizers(device: torch.device) -> tuple[OptimizerRate, ...]:
    """AdamW on float32 matrices, past the caches, by each of torch's implementations."""
    rows, count, columns = _OPTIMIZER_SHAPES[device.type]
    found = []
    for implementation in ("fused", "foreach"):
        parameters = [torch.nn.Parameter(torch.randn(rows, columns, device=device)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(
            parameters, fused=implementation == "fused", foreach=implementation == "foreach"
        )
        seconds = best_seconds(optimizer.step, device, _BUDGET_S / 4)
        elements = sum(parameter.numel() for parameter in parameters)
        found.append(
            OptimizerRate(optimizer="AdamW", implementation=implementation, elements_per_s=elements / seconds)
        )
    return tuple(found)


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
