"""A script's own torch-function mode (one that counts or logs what is called, or torch.set_default_device's) sees what the
script calls, and nothing that memadvisor asks of tensors meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _len_torch_function_stack


def past_modes(call: Callable[..., None]) -> Callable[..., None]:
    """The same, past all modes of this kind, and past what subclasses of tensors do when they are asked something."""

    def past(*args: Any) -> None:
        if not _len_torch_function_stack():
            call(*args)
            return
        with torch._C.DisableTorchFunction():
            call(*args)

    return past
