"""How a model is cut into units: the one rule that capture, planner and engines share.

Every parameter belongs to exactly one unit. Where a module has two or more children of one class
that hold parameters and are themselves made of modules (transformer blocks, residual blocks), each
such child is a unit, and so is the only one of a list (a layer whose weights all depths share) or of a
ModuleDict by numbers (the layer that a pipeline's stage has kept of all); elsewhere the rule descends, and a leaf with parameters is a unit of its own.
A bare container (Sequential, ModuleList) is such a child only when it holds nothing but leaves: the
stages of a ResNet are containers of blocks, not blocks. Nor are children with names of their own, in no list, that hold a
list of more blocks than there are of them: T5's encoder and decoder are two stacks of one class.
A module that others hold in plain attributes or lists, in two places or more, is called from there: it is one block,
unless there are blocks in it. So is one that a loop calls, once that has been seen (looped_blocks.py).
Lists in a list, one a layer of `[norm, attention]` or `[norm, feed-forward]`, are one list.
Parameters that a module holds directly, beside such children, belong to that module's unit, and so do those in a
ParameterList or ParameterDict of its own: nobody can call these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from memadvisor.run.children import children_of
from memadvisor.run.shared_modules import shared_modules

_LISTS = ("Sequential", "ModuleList")
_CONTAINERS = (*_LISTS, "ModuleDict")
_OF_PARAMETERS = ("ParameterList", "ParameterDict")


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """A module as the cut sees it: `parameters` are the names it holds itself, children by position. `is_shared`: others hold
    it too (shared_modules.py)."""

    name: str
    type_name: str
    num_own_parameters: int
    children: tuple[ModuleNode, ...]
    is_shared: bool = False


def cut_units(root: ModuleNode, looped: Collection[str] = frozenset()) -> dict[str, str]:
    """The unit of every module: module name -> unit name, in order of definition. `looped`: blocks that a loop calls.

    A unit's name is that of its topmost module; the root's is "" for a single model.
    """
    units: dict[str, str] = {}
    _cut(root, root.name, units, looped)
    return units


def _cut(
    node: ModuleNode,
    enclosing: str,
    units: dict[str, str],
    looped: Collection[str],
    around: Collection[str] = frozenset(),
) -> None:
    """`around`: the classes of blocks that are repeated in the list of lists that the node is in."""
    if node.name in looped:
        _assign(node, node.name, units)
        return
    repeated = _repeated_blocks(_members(node) if node.type_name == "ModuleList" else node.children) | {
        *around
    }
    if node.type_name not in _LISTS:
        repeated -= _stacks(node.children, repeated)
    if len(node.children) == 1 and (node.type_name == "ModuleList" or _is_numbered(node)):
        repeated = {node.children[0].type_name} - {*_CONTAINERS}
    is_unit = not node.children or node.num_own_parameters > 0 or _holds_lists_of_parameters(node)
    own = node.name if is_unit and _has_parameters(node) else enclosing
    units[node.name] = own
    for child in node.children:
        if child.type_name in _OF_PARAMETERS:
            _assign(child, own, units)
        elif (child.type_name in repeated or _is_shared_block(child)) and _may_be_block(child):
            _assign(child, child.name, units)
        else:
            _cut(child, own, units, looped, repeated if _is_list_in_list(node, child) else ())


def _holds_lists_of_parameters(node: ModuleNode) -> bool:
    """Itself, and can be called: a list of such lists is of the module that holds it."""
    lists = [child for child in node.children if child.type_name in _OF_PARAMETERS]
    return node.type_name not in _CONTAINERS and any(map(_has_parameters, lists))


def _is_numbered(node: ModuleNode) -> bool:
    """Whether a ModuleDict is a list that may lack some: torchtitan's layers."""
    keys = [child.name.rpartition(".")[2] for child in node.children]
    return node.type_name == "ModuleDict" and all(map(str.isdecimal, keys))


def _is_shared_block(node: ModuleNode) -> bool:
    return node.is_shared and node.type_name not in _CONTAINERS and not _holds_blocks(node)


def _holds_blocks(node: ModuleNode) -> bool:
    return bool(_repeated_blocks(node.children)) or any(map(_holds_blocks, node.children))


def _is_list_in_list(node: ModuleNode, child: ModuleNode) -> bool:
    return node.type_name == child.type_name == "ModuleList"


def _members(node: ModuleNode) -> list[ModuleNode]:
    """What a list holds, and the lists in it."""
    found = []
    for child in node.children:
        found += _members(child) if _is_list_in_list(node, child) else [child]
    return found


def _repeated_blocks(children: Sequence[ModuleNode]) -> set[str]:
    names = [child.type_name for child in children if _may_be_block(child)]
    return {name for name in names if names.count(name) >= 2}


def _stacks(children: Sequence[ModuleNode], repeated: Collection[str]) -> set[str]:
    found = set()
    for name in repeated:
        alike = [child for child in children if child.type_name == name and _may_be_block(child)]
        if all(_longest_list(child) > len(alike) for child in alike):
            found.add(name)
    return found


def _longest_list(node: ModuleNode) -> int:
    """The most blocks of one class in a list inside the module."""
    inside = [_longest_list(child) for child in node.children]
    if node.type_name in _LISTS:
        names = [child.type_name for child in node.children if _may_be_block(child)]
        inside += [names.count(name) for name in set(names)]
    return max(inside, default=0)


def _may_be_block(node: ModuleNode) -> bool:
    if not node.children or not _has_parameters(node):
        return False
    return node.type_name not in _CONTAINERS or not any(child.children for child in node.children)


def _assign(node: ModuleNode, unit: str, units: dict[str, str]) -> None:
    units[node.name] = unit
    for child in node.children:
        _assign(child, unit, units)


def _has_parameters(node: ModuleNode) -> bool:
    return node.num_own_parameters > 0 or any(_has_parameters(child) for child in node.children)


def innermost(name: str, groups: Collection[str]) -> str | None:
    """The innermost of these modules that something of this name is inside of; None: none is."""
    while name and name not in groups:
        name = name.rpartition(".")[0]
    return name if name in groups else None


def unwrap(model: Any) -> Any:
    """The script's own model inside DistributedDataParallel, DataParallel and torch.compile wrappers.

    A module around DistributedDataParallel that has no parameter beside (Lightning's Fabric makes such) is a wrapper too.
    """
    while (inner := inside_wrapper(model)) is not None:
        model = inner
    return model


def inside_wrapper(model: Any) -> Any | None:
    """What a wrapper is directly around; None of a module that is none."""
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):
        return model._orig_mod
    if _is_parallel(model):
        return model.module
    parallel = [child for child in children_of(model) if _is_parallel(child)]
    if len(parallel) == 1 and _parameters(model) == _parameters(parallel[0]):
        return parallel[0]
    return None


def _is_parallel(module: Any) -> bool:
    return any(base.__name__ in ("DistributedDataParallel", "DataParallel") for base in type(module).__mro__)


def _parameters(module: Any) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def module_tree(model: Any, name: str = "") -> ModuleNode:
    """A live torch module as the cut sees it; a module met twice is described where it is met first."""
    return _describe(model, name, set(), shared_modules(model))


def _describe(module: Any, name: str, seen: set[int], shared: Collection[int]) -> ModuleNode:
    seen.add(id(module))
    prefix = f"{name}." if name else ""
    return ModuleNode(
        name=name,
        type_name=_type_name(module),
        num_own_parameters=sum(parameter is not None for parameter in module._parameters.values()),
        children=tuple(
            _describe(child, prefix + child_name, seen, shared)
            for child_name, child in module._modules.items()
            if child is not None and id(child) not in seen
        ),
        is_shared=id(module) in shared,
    )


def _type_name(module: Any) -> str:
    """The class that the script has: what torch.export has traced is all of one class, which knows what it stands for, and
    a list is said to be what is in it."""
    name = type(module).__name__
    if name != "InterpreterModule" or not isinstance(written := getattr(module, "_ty", None), str):
        return name
    children = [child for key, child in module._modules.items() if key.isdigit()]
    if children and len(children) == len(module._modules) and getattr(children[0], "_ty", None) == written:
        return "ModuleList"
    return written.rpartition(".")[2]


def is_around_a_list(wrapper: Any) -> bool:
    """Whether a DistributedDataParallel has parameters and no model, as torch's composable `replicate` makes it."""
    return type(wrapper.module).__name__ in _OF_PARAMETERS
