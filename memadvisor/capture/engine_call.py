"""What autograd's engine is called for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Parameter

_CREATES_GRAPH, _INPUTS = 3, 4  # among the arguments


def asked_of_engine(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether a derivative is made of which a loss comes that has its own backward (`torch.autograd.grad` with
    `create_graph=True`), and whether it is for parameters, as `backward` always is."""
    if kwargs.get("accumulate_grad") or len(args) <= _INPUTS:
        return False, True
    return bool(args[_CREATES_GRAPH]), any(isinstance(each, Parameter) for each in args[_INPUTS] or ())
