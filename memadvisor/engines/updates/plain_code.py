"""Whether an optimizer's class does nothing but arithmetic on what it holds, so that a copy may step unnoticed.

A class of the script's own may count its steps, write a file or talk to other ranks. Its code tells: it is plain where all that
its functions name is torch, arithmetic, harmless builtins, and functions and constants of which the same holds. What it
changes is then what it was given, and a copy is given copies. In doubt it is not plain.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

_MODULES = frozenset(
    (
        "math",
        "torch",
        "numpy",
        "typing",
        "collections",
        "functools",
        "itertools",
        "operator",
        "copy",
        "warnings",
    )
)
_BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "complex",
        "dict",
        "divmod",
        "enumerate",
        "filter",
        "float",
        "frozenset",
        "getattr",
        "hasattr",
        "id",
        "int",
        "isinstance",
        "issubclass",
        "iter",
        "len",
        "list",
        "map",
        "max",
        "min",
        "next",
        "pow",
        "print",
        "property",
        "range",
        "repr",
        "reversed",
        "round",
        "set",
        "slice",
        "sorted",
        "staticmethod",
        "str",
        "sum",
        "super",
        "tuple",
        "zip",
        "NotImplemented",
        "Ellipsis",
    ]
)
# Attributes by which torch and numpy reach files, other ranks and what holds for a whole process.
_REACHES = frozenset(
    [
        "save",
        "savez",
        "savetxt",
        "tofile",
        "load",
        "dump",
        "dumps",
        "write",
        "open",
        "system",
        "distributed",
        "multiprocessing",
        "hub",
    ]
)
_DUNDERS = frozenset(("__init__", "__setstate__", "__getstate__", "__name__"))
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range)
_TORCHS = Path(torch.__file__).resolve().parent


def is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Of the object too: what it holds beside its parameters and their state are numbers, words and tensors."""
    seen: set[int] = set()
    own = [kind for kind in type(optimizer).__mro__[:-1] if not kind.__module__.startswith("torch.")]
    held = [value for name, value in vars(optimizer).items() if not _is_torchs_attribute(name)]
    held += [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return all(_is_plain_class(kind, seen) for kind in own) and all(map(_is_plain_value, held))


def _is_torchs_attribute(name: str) -> bool:
    """`step`: a scheduler's own, which copies do not have."""
    return name in ("state", "param_groups", "step", "_zero_grad_profile_name") or (
        name.startswith("_optimizer_") and name.endswith("_hooks")
    )


def _is_plain_class(kind: type, seen: set[int]) -> bool:
    """No list or dictionary, either, which all its objects would share."""
    for name, value in vars(kind).items():
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(inner, property):
            if not all(
                _is_plain_function(f, seen) for f in (inner.fget, inner.fset, inner.fdel) if f is not None
            ):
                return False
        elif isinstance(inner, types.FunctionType):
            if not _is_plain_function(inner, seen):
                return False
        elif not (name.startswith("__") or _is_constant(inner)):
            return False
    return True


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain_value, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain_value, (*value.keys(), *value.values())))
    return _is_constant(value) or type(value) in (torch.Tensor, torch.nn.Parameter, torch.Generator)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, _CONSTANTS)


def _is_plain_function(function: Any, seen: set[int]) -> bool:
    """With what a decorator of torch's is around."""
    if id(function) in seen:
        return True
    seen.add(id(function))
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None and not _is_plain_global(wrapped, seen):
        return False
    if not isinstance(function, types.FunctionType):
        return False
    file = Path(function.__code__.co_filename).resolve()
    if file.is_relative_to(_TORCHS):
        return "distributed" not in file.parts and _is_plain_attribute(function.__name__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return all(_is_plain_cell(name, cell, seen) for name, cell in cells.items()) and all(
        _is_plain_code(code, function.__globals__, seen) for code in _codes(function.__code__)
    )


def _is_plain_cell(name: str, cell: types.CellType, seen: set[int]) -> bool:
    """What a function within another refers to; `super` has its class there, which is looked at by itself."""
    try:
        return name == "__class__" or _is_plain_global(cell.cell_contents, seen)
    except ValueError:  # empty
        return True


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_plain_code(code: types.CodeType, names: Mapping[str, Any], seen: set[int]) -> bool:
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        if kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return False
        if kind == "IMPORT_NAME" and str(name).partition(".")[0] not in _MODULES:
            return False
        if kind in ("LOAD_GLOBAL", "LOAD_NAME") and not _is_plain_name(name, names, seen):
            return False
        if ("ATTR" in kind or kind in ("LOAD_METHOD", "IMPORT_FROM")) and not _is_plain_attribute(str(name)):
            return False
    return True


def _is_plain_name(name: str, names: Mapping[str, Any], seen: set[int]) -> bool:
    if name in names:
        return _is_plain_global(names[name], seen)
    known = getattr(builtins, name, None)
    return name in _BUILTINS or (isinstance(known, type) and issubclass(known, BaseException))


def _is_plain_attribute(name: str) -> bool:
    if name.startswith("__"):
        return name in _DUNDERS
    is_setting = name.startswith("set_") and name != "set_grad_enabled"
    return name not in _REACHES and not is_setting and not name.startswith("register_")


def _is_plain_global(value: Any, seen: set[int]) -> bool:
    if isinstance(value, types.ModuleType):
        root, _, rest = value.__name__.partition(".")
        return root in _MODULES and not rest.startswith("distributed")
    if _is_constant(value):
        return True
    if isinstance(value, types.FunctionType):
        return _is_plain_function(value, seen)
    module = getattr(value, "__module__", None) or ""
    is_known = module.partition(".")[0] in (*_MODULES, "builtins") and "distributed" not in module
    return is_known and isinstance(value, (type, types.BuiltinFunctionType))
