"""What goes into a unit that computes in another dtype than float32, and what comes out of the model.

Floating-point inputs of a unit, given by position or by name, are cast to the dtype of its parameters; so are those
of the model. That is where FSDP2 casts too, and what a script would otherwise have to do itself: its batches are
float32, and a model may make float32 between two units (masks, tables of positions).

What the model returns in that dtype is given back as float32: the script computes its loss from it, and was
written for that.

As for recomputation, the forward of a class is wrapped, not the module, so nothing of ours is copied or pickled.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from memadvisor.engines.script.casting import cast
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.flat import UnitState
from memadvisor.errors import PlanError
from memadvisor.precision import Precision
from memadvisor.run.torch_names import dtype_name


class Casts:
    """The units of a process that compute in another dtype. Modules are held weakly."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._inputs: weakref.WeakKeyDictionary[torch.nn.Module, torch.dtype] = weakref.WeakKeyDictionary()
        self._roots: weakref.WeakKeyDictionary[torch.nn.Module, torch.dtype] = weakref.WeakKeyDictionary()
        self._wrapped: set[type] = set()
        self._running: set[int] = set()  # a class may call the forward of its base class
        undo.add(self._inputs.clear)
        undo.add(self._roots.clear)

    def attach(self, root: torch.nn.Module, units: Iterable[UnitState]) -> None:
        """Cast for the units whose parameters are computed with in another dtype."""
        for unit in units:
            for flat in unit.flats:
                if flat.param_dtype != flat.script_dtype:
                    self._inputs[unit.live.module] = self._roots[root] = flat.param_dtype
                    self._wrap(type(unit.live.module))
                    self._wrap(type(root))

    def _wrap(self, kind: type) -> None:
        if kind in self._wrapped:
            return
        self._wrapped.add(kind)
        original: Callable[..., Any] = kind.forward  # type: ignore[attr-defined]

        @functools.wraps(original)
        def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            dtype = self._inputs.get(module) or self._roots.get(module)
            if dtype is None or id(module) in self._running:
                return original(module, *args, **kwargs)
            self._running.add(id(module))
            try:
                args, kwargs = cast((args, kwargs), dtype, _is_floating)
                output = original(module, *args, **kwargs)
            finally:
                self._running.discard(id(module))
            if module in self._roots:
                output = cast(output, torch.float32, lambda tensor: tensor.dtype == dtype)
            return output

        self._undo.replace(kind, "forward", forward)


def _is_floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def check_castable(root: torch.nn.Module, precision: Precision) -> None:
    """Raise PlanError for layers that cannot compute with parameters in another dtype."""
    for name, module in root.named_modules():
        if not isinstance(module, _NormBase) or not module.affine or module.running_mean is None:
            continue
        kept, computed = dtype_name(module.running_mean.dtype), dtype_name(module.weight.dtype)
        if precision.of_parameter(computed) != kept:
            raise PlanError(
                f"{name!r} keeps running statistics in {kept}, which torch does not mix with weights in "
                f"{precision.of_parameter(computed)}.",
                hint="leave out the plan's param_dtype (--param-dtype).",
            )
