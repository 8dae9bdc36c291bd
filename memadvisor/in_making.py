"""Whether a module is called while what it is a part of is being made, or taken apart, and so for no training.

Models run a forward of made-up inputs in their `__init__` to learn shapes and strides (YOLO's layers, BYOL's encoders,
convolutions in front of a linear layer): such calls of parts do not make each part a model.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList


def is_in_making(part: torch.nn.Module) -> bool:
    """Asked inside of the call, on the thread that calls. A parametrized weight (weight_norm, spectral_norm) that is looked at
    calls a module of torch's own, and is no model either, whenever that is."""
    if isinstance(part, ParametrizationList):
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and _makes_module_with(frame, part):
            return True
        frame = frame.f_back
    return False


def is_taken_apart() -> bool:
    """torch.fx traces: what is called is given names of values, and what is made of it will have modules of its own around the
    same layers."""
    fx = sys.modules.get("torch.fx._symbolic_trace")
    return fx is not None and bool(getattr(fx, "_is_fx_tracing_flag", False))


def _makes_module_with(frame: FrameType, part: torch.nn.Module) -> bool:
    first = frame.f_code.co_varnames[:1]  # self, whatever it is called
    made: Any = frame.f_locals.get(first[0]) if first else None
    # An object whose class lies about itself may do anything when it is asked, and one that is half made has no parts.
    if made is None or not issubclass(type(made), torch.nn.Module) or "_modules" not in vars(made):
        return False
    return any(module is part for module in made.modules())
