"""Gradients that parameters hold beside their own, under a name that says so: of each sample (opacus's `grad_sample`, BackPACK's
`grad_batch`), or in another dtype (Megatron's `main_grad`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memadvisor.capture.models import Models


def kept_gradients(models: Models) -> Iterator[tuple[torch.Tensor, str]]:
    """Each with its parameter's unit. Those as large as the parameter, or several such one after another."""
    for _, unit, parameter in models.parameters():
        for name, held in tuple(vars(parameter).items()):
            if "grad" in name:
                values = held if isinstance(held, (list, tuple)) else (held,)
                yield from ((each, unit) for each in values if _is_of(each, parameter))


def _is_of(value: object, parameter: torch.Tensor) -> bool:
    try:
        if not isinstance(value, torch.Tensor) or value.dim() < parameter.dim():
            return False
        return value.shape[value.dim() - parameter.dim() :] == parameter.shape
    except RuntimeError:  # nested, of strided ones: they have no shape
        return False
