"""Which of torch's backends carries a process group's messages."""

from __future__ import annotations

from typing import Any

import torch


def uses_nccl(group: Any) -> bool:
    """Whether NCCL carries what lies on a GPU. A group that was made without a backend's name may have one, too."""
    try:
        return str(group._get_backend(torch.device("cuda")).name()).lower() == "nccl"
    except (RuntimeError, AttributeError):
        return False  # the group has no backend for CUDA


def sends_from_host(group: Any) -> bool:
    """Whether the group takes what lies in the host's memory, as NCCL alone does not."""
    try:
        return group._get_backend(torch.device("cpu")) is not None
    except RuntimeError:
        return False
