"""How runs and plans write what torch names; capture, calibration and engines share it, and it needs no torch."""

from __future__ import annotations


def dtype_name(dtype: object) -> str:
    """Of a torch.dtype: `float32`."""
    return str(dtype).removeprefix("torch.")
