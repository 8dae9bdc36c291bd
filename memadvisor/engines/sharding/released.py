"""Parameters whose values are not here: what stage 3 leaves in their place between uses.

A released parameter keeps its identity, name, shape and hooks; its data is one NaN expanded to its shape
(0 for integers) in the dtype that modules compute with, since autograd must know one dtype of it. Its class
is swapped (as torch does with UninitializedParameter), so that whatever the script does with its values is
done on a full copy, which is lent (loans.py), and what is written into it is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from memadvisor.engines.sharding.arrivals import wait_for
from memadvisor.engines.sharding.flat import Flat, Slot
from memadvisor.engines.sharding.sources import Lates, in_state_dict
from memadvisor.engines.sharding.tensor_functions import is_writing, name_of, needs_no_values
from memadvisor.errors import PlanError

# What tells the dtype, which is another one for the script than for the model where copies are cast.
_OF_DTYPE: dict[str, Callable[[torch.Tensor, torch.dtype], Any]] = {
    "dtype": lambda parameter, dtype: dtype,
    "itemsize": lambda parameter, dtype: dtype.itemsize,
    "element_size": lambda parameter, dtype: dtype.itemsize,
    "nbytes": lambda parameter, dtype: dtype.itemsize * parameter.numel(),
}

# What reaches the memory without a trace: an address, or a tensor whose writes are not counted.
_UNSEEN = {"data", "data_ptr", "__cuda_array_interface__"}

# How scripts come by the node that adds to its gradient: `p.view_as(p).grad_fn.next_functions[0][0]`.
_SAME = {"view_as", "expand_as"}

# What shows it as it is: a parameter, and not what was made of one.
_PRINTING = {"__repr__", "__format__"}

_slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
_lates: weakref.WeakValueDictionary[int, Lates] = weakref.WeakValueDictionary()


class ReleasedParameter(torch.nn.Parameter):
    """The class that a parameter has while it is released; `isinstance(p, nn.Parameter)` stays true."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            raise PlanError(
                "The script asks torch.autograd.grad for gradients by parameters, which ZeRO stage 3 has not there then.",
                hint="use --zero 2.",
            )
        if func is torch.autograd.backward:  # `inputs` of it: where gradients go, and not what of
            return func(*tree_map(_edge, args), **tree_map(_edge, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            if name_of(func) in _SAME and len(args) == 2 and args[0] is args[1]:
                return _borrow(args[0])
            tell = _OF_DTYPE.get(name_of(func))
            if tell is not None and type(args[0]) is ReleasedParameter:
                return tell(args[0], _seen_dtype(args[0]))
            if needs_no_values(func):
                return func(*args, **kwargs)
            wait_for(args, kwargs)
            of_late = in_state_dict() and name_of(func) == "detach"
            if of_late and type(args[0]) is ReleasedParameter:
                slot, lates = _owner(args[0])
                return lates.tensor(slot, "", slot.flat.script_dtype)
            writes = bool(args) and type(args[0]) is ReleasedParameter and is_writing(func)
            if writes:
                slot, lates = _owner(args[0])
                lates.sharded.meet()  # nobody still reads the old values
                if name_of(func) == "copy_" and lates.is_of(args[1], slot):
                    lates.sharded.num_writes += 1
                    return args[0]  # it is the parameter itself
            if getattr(func, "__name__", "") == "__set__":
                result = None  # parameter.data = value
                slot, lates = _owner(args[0])
                lates.loans.give(slot, args[1])
            else:
                if name_of(func) in _UNSEEN and type(args[0]) is ReleasedParameter:
                    _owner(args[0])[0].flat.is_loan_fixed = True
                borrow = _printed if name_of(func) in _PRINTING else partial(_borrow, writes=writes)
                result = func(*tree_map(borrow, args), **tree_map(borrow, kwargs))
            if not writes:
                return result
            slot, lates = _owner(args[0])
            lates.loans.keep_writes(slot)
        return args[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(_lent(self).detach().clone(), self.requires_grad)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole: Any = torch.nn.Parameter(_lent(self).detach().clone(), self.requires_grad)
        return whole.__reduce_ex__(protocol)


def _edge(value: Any) -> Any:
    if type(value) is not ReleasedParameter:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return torch.autograd.graph.get_gradient_edge(value)


def _printed(value: Any) -> Any:
    if type(value) is not ReleasedParameter:
        return value
    return torch.nn.Parameter(_lent(value).detach().to(_seen_dtype(value)), value.requires_grad)


class _Borrow(torch.autograd.Function):
    """Full values of a released parameter, differentiable with respect to the parameter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def hide(slot: Slot, lates: Lates) -> None:
    """Leave NaN in the place of a parameter's values, which `lates` has for the script."""
    parameter = slot.parameter
    if slot.filler is None:
        _slots[id(parameter)] = slot
        _lates[id(parameter)] = lates
        dtype = slot.flat.param_dtype
        filler = float("nan") if dtype.is_floating_point else 0
        slot.filler = torch.full((), filler, dtype=dtype, device=slot.flat.device).expand(slot.shape)
    parameter.data = slot.filler
    if type(parameter) is torch.nn.Parameter:
        parameter.__class__ = ReleasedParameter


def show(slot: Slot, full: torch.Tensor) -> None:
    """Give a parameter its values again, as a view of `full`: the flat's own, or a copy of it."""
    if full is not slot.flat.full:
        show_values(slot, slot.view(full))
        return
    if slot.shown is None:
        slot.shown = slot.view(full)
    show_values(slot, slot.shown)


def show_values(slot: Slot, values: torch.Tensor) -> None:
    """Give a parameter `values`, of its own shape."""
    parameter = slot.parameter
    if type(parameter) is ReleasedParameter:
        parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]  # its own class
    parameter.data = values
    slot.version = parameter._version


def release(flat: Flat, lates: Lates, *, may_be_written: bool = False) -> None:
    """Free a flat's full parameters, and keep what a module has written into them. may_be_written: by code of the script's
    too, which may have done it through `p.data`, and that shows in no version."""
    if flat.full is not None and flat.present:
        are_replaced = _take_replaced(flat)
        may_be_written = may_be_written and flat.is_cheap_to_keep
        if are_replaced or may_be_written or any(slot.is_written for slot in flat.slots):
            flat.keep_written()
        for slot in flat.slots:
            hide(slot, lates)
        flat.full.untyped_storage().resize_(0)


def _take_replaced(flat: Flat) -> bool:
    """Copy into `full` what the script has given parameters in place of their views of it (`p.data = ...`), as a module's
    hook may; whether there is any."""
    found = [
        (slot, shown)
        for slot in flat.slots
        if (shown := slot.shown) is not None and slot.parameter.data_ptr() != shown.data_ptr()
    ]
    for slot, shown in found:
        if slot.parameter.shape != slot.shape:
            raise PlanError(
                f"Since the script has assigned its data, {slot.name!r} is {tuple(slot.parameter.shape)} now, and was "
                f"{tuple(slot.shape)}, which a plan of ZeRO stage 3 cannot follow.",
                hint="copy the values into the parameter instead (p.data.copy_), or run without stages.",
            )
        with torch.no_grad():
            shown.copy_(slot.parameter)
    return bool(found)


def _owner(parameter: torch.Tensor) -> tuple[Slot, Lates]:
    slot, lates = _slots.get(id(parameter)), _lates.get(id(parameter))
    if slot is None or lates is None or slot.parameter is not parameter:
        raise AssertionError("a released parameter without an owner")
    return slot, lates


def _lent(parameter: torch.Tensor) -> torch.Tensor:
    slot, lates = _owner(parameter)
    # Else what is written into the loan would be part of the script's transform.
    with torch._C._DisableFuncTorch():
        lent = lates.loans.lend(slot)
        theirs = lates.loans.followers.memory_of(slot)
    return lent if theirs is None else theirs


def _seen_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype that whoever looks now finds: the model's while it computes, else the script's own."""
    slot, lates = _slots.get(id(parameter)), _lates.get(id(parameter))
    if slot is None or lates is None or lates.sharded.computes:
        return parameter.dtype
    return slot.flat.script_dtype


def _borrow(value: Any, writes: bool = False) -> Any:
    if type(value) is not ReleasedParameter:
        return value
    lent = _lent(value)
    if not writes:  # else what is written would go to a copy of the copy
        lent = lent.to(_seen_dtype(value))
    if torch.is_grad_enabled() and value.requires_grad:
        function: Any = _Borrow  # whose `apply` has types from torch 2.14 on alone
        return function.apply(value, lent)
    return lent
