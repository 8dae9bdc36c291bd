"""What torch finds on this machine, as one JSON object on stdout: run in a process of its own, which may die of it."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist


def torch_facts() -> dict[str, object]:
    """The fields of `TorchFacts` (memadvisor/doctor/facts.py)."""
    devices, error = _devices()
    return {
        "version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "devices": devices,
        "device_error": error,
        "backends": _backends(),
        "num_threads": torch.get_num_threads(),
    }


def _devices() -> tuple[list[dict[str, object]], str | None]:
    if torch.version.cuda is None and torch.version.hip is None:
        return [], None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return [_device(index) for index in range(torch.cuda.device_count())], None
    except (RuntimeError, AssertionError) as error:
        return [], next(iter(str(error).splitlines()), type(error).__name__)


def _device(index: int) -> dict[str, object]:
    free_bytes, memory_bytes = torch.cuda.mem_get_info(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "memory_bytes": memory_bytes,
        "free_bytes": free_bytes,
    }


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, is_there in known.items() if is_there]


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
