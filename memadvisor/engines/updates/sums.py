"""What sums of a tensor are in."""

from __future__ import annotations

import torch


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What torch sums in inside of one kernel: 16 bits would overflow, or round each part's."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
