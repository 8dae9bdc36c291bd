"""In what the device computes products of float32 tensors: the script's choice, or torch's default."""

from __future__ import annotations

import torch


def float32_products(device: torch.device) -> dict[str, str | None]:
    """`matmul` and `convolution`: "ieee" (24 bits) or "tf32" (11). None where the device has no such choice, or none is told.

    torch's defaults are ieee for the former and tf32 for the latter; "none" is that of `torch.backends.fp32_precision`, and
    of matrix products the default.
    """
    if device.type != "cuda":
        return {"matmul": None, "convolution": None}
    convolution = getattr(torch.backends.cudnn, "conv", None)
    backends = {"matmul": torch.backends.cuda.matmul, "convolution": convolution}
    return {name: _told(getattr(backend, "fp32_precision", None)) for name, backend in backends.items()}


def _told(precision: object) -> str | None:
    if precision == "none":
        precision = getattr(torch.backends, "fp32_precision", None)
        return "ieee" if precision == "none" else _known(precision)
    return _known(precision)


def _known(precision: object) -> str | None:
    return precision if isinstance(precision, str) and precision in ("ieee", "tf32") else None
