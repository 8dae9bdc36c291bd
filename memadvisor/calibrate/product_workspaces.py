"""What products of matrices in bfloat16 take for themselves on this machine's CPU, by running each once."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from memadvisor.autocast import NarrowProduct, NarrowWork

# oneDNN works in blocks: beyond these sizes more of them take no more memory. Only a depth that lies by rows is not cut.
_MOST_BATCHES, _MOST_ROWS, _MOST_COLUMNS, _MOST_TURNED = 8, 1024, 2048, 2048
_FLOPS = 1e12  # that all may take together: some seconds
_QUIET = "KINETO_LOG_LEVEL"  # else the profiler prints when it starts and when it stops


def product_workspaces(products: Set[NarrowProduct], num_threads: int | None = None) -> dict[NarrowWork, int]:
    """Bytes of each, with as many threads. Smaller products come first; what is left when that has taken long is said to
    take as much as the largest that was seen."""
    known: dict[NarrowProduct, int] = {}
    left_flops = _FLOPS
    with alone(num_threads) as may_measure:
        if not may_measure:
            return {}
        for product in sorted({_cut(product) for product in products}, key=_flops):
            left_flops -= _flops(product)
            known[product] = _workspace_bytes(product) if left_flops > 0 else max(known.values(), default=0)
    return {product: known[_cut(product)] for product in products}


@contextmanager
def alone(num_threads: int | None) -> Iterator[bool]:
    """So many threads, and no graph; whether anything can be measured: not under a profiler of the script's own, for torch has
    one at a time."""
    if torch._C._autograd._profiler_enabled():
        yield False
        return
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        with _quiet_profiler(), torch.no_grad():
            yield True
    finally:
        torch.set_num_threads(before)


def _cut(product: NarrowProduct) -> NarrowProduct:
    """Of sizes from which on it takes the same."""
    *batch, rows, depth = product.left
    columns = min(product.right[-1], _MOST_COLUMNS)
    if product.is_turned:
        rows, depth = min(rows, _MOST_TURNED), min(depth, _MOST_TURNED)
    else:
        rows = min(rows, _MOST_ROWS)
    batch = [min(size, _MOST_BATCHES) for size in batch]
    return NarrowProduct((*batch, rows, depth), (*batch, depth, columns), product.is_turned)


def _flops(product: NarrowProduct) -> int:
    return 2 * math.prod(product.left) * product.right[-1]


def _workspace_bytes(product: NarrowProduct) -> int:
    right = torch.zeros(product.right, dtype=torch.bfloat16, device="cpu")
    *batch, rows, columns = product.left
    if product.is_turned:
        left = torch.zeros(*batch, columns, rows, dtype=torch.bfloat16, device="cpu").transpose(-1, -2)
    else:
        left = torch.zeros(product.left, dtype=torch.bfloat16, device="cpu")
    return bytes_beside(lambda: [left @ right])


def bytes_beside(work: Callable[[], list[torch.Tensor | None]]) -> int:
    """What is there at the highest instant of a work beside its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        results = work()
        result_bytes = sum(each.untyped_storage().nbytes() for each in results if each is not None)
        # What goes behind the profiler's end stays in torch's count of this process, which later profiles begin with.
        results.clear()
    level_bytes = most_bytes = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level_bytes += event.nbytes()
            most_bytes = max(most_bytes, level_bytes)
    return max(0, most_bytes - result_bytes)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "6"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_QUIET, None)
        else:
            os.environ[_QUIET] = before
