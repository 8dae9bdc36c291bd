"""Weights that mirror a model's and that nothing trains: averages (EMA, SWA), target networks, a state dictionary that is
kept, what a model has where the script calls it with others in the place of that. What is trained is none, and what a model
of the training is (a teacher that is called) has parameters.

A run names no library's classes: a module, list or dictionary holds copies where its tensors have the shapes of a known
model's, one for one and in order, are in no optimizer and have no gradient. Of modules that may be a part of the model which
is made of further modules: one layer may be as large as another by chance. Lists and dictionaries may as well hold a
momentum, or a measure of each weight's importance: what is a copy is near the weights, of which a few are looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import torch

from memadvisor.capture.models import Models
from memadvisor.capture.tensor_storage import plain_tensors
from memadvisor.run.children import children_of, modules_of
from memadvisor.run.living import all_objects, living, one_look, outermost_modules

_Shapes = tuple[torch.Size, ...]
_NUM_LOOKED_AT, _MOST_LOOKED_AT = 8, 256  # tensors, and elements of each
_NEAR = 0.5
_LISTS, _DICTIONARIES = (list, tuple), (dict, OrderedDict)


def weight_copies(models: Models) -> list[torch.Tensor]:
    """Of all models that are known, wherever Python can reach them; a storage of the model's own may be among them."""
    with torch._C.DisableTorchFunctionSubclass(), one_look():
        own = [parameter for *_, parameter in models.parameters()]
        mirrored = _Mirrored.of([root for _, root in models.roots()], own)
        others = {
            id(parameter)
            for optimizer in living(torch.optim.Optimizer)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        not_copies = others.union(map(id, own))
        return [
            *models.stood_in_for(),
            *_in_modules(mirrored, not_copies),
            *_in_containers(mirrored, not_copies),
        ]


@dataclass(slots=True)
class _Mirrored:
    """The shapes that copies are told by, and the modules that are of a model."""

    of_modules: set[_Shapes] = field(default_factory=set)
    of_containers: dict[_Shapes, list[torch.Tensor]] = field(default_factory=dict)
    modules: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, roots: Sequence[torch.nn.Module], own: Sequence[torch.Tensor]) -> _Mirrored:
        found = cls()
        found._add(own)
        for root in roots:
            found._add(_tensors_of(root, "_parameters"))
            found._add(tensor for each in modules_of(root) for tensor in _kept_in_state(each))
            for module in modules_of(root):
                found.modules.add(id(module))
                inner = _tensors_of(module, "_parameters")
                if any(_tensors_of(child, "_parameters") for child in children_of(module)):
                    found.of_modules.add(_shapes(inner))
        for module in _around(roots):
            kept = [tensor for each in modules_of(module) for tensor in _kept_in_state(each)]
            found.of_containers.setdefault(_shapes(kept), kept)
        found.of_modules = set(filter(_is_telling, found.of_modules))
        found.of_containers = {key: each for key, each in found.of_containers.items() if _is_telling(key)}
        return found

    def _add(self, tensors: Iterable[torch.Tensor]) -> None:
        """All of a model's, and those of them that are trained."""
        tensors = list(tensors)
        for some in (tensors, [each for each in tensors if each.requires_grad]):
            self.of_containers.setdefault(_shapes(some), some)
            self.of_modules.add(_shapes(some))


def _is_telling(shapes: _Shapes) -> bool:
    return len(shapes) > 1 and any(len(shape) > 1 for shape in shapes)


def _shapes(tensors: Iterable[torch.Tensor]) -> _Shapes:
    try:
        return tuple(tensor.shape for tensor in tensors)
    except RuntimeError:  # nested, of strided ones: they have no shape
        return ()


def _in_modules(mirrored: _Mirrored, not_copies: Set[int]) -> Iterator[torch.Tensor]:
    """From the outermost module inwards: what is around a copy may hold the model itself beside it."""
    left = outermost_modules(torch.nn.Module)
    seen: set[int] = set(mirrored.modules)
    while left:
        module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        parameters, buffers = _tensors_of(module, "_parameters"), _tensors_of(module, "_buffers")
        if _are_copies(parameters or buffers, mirrored.of_modules, not_copies):
            yield from (*parameters, *buffers)
        else:
            left += children_of(module)


def _in_containers(mirrored: _Mirrored, not_copies: Set[int]) -> Iterator[torch.Tensor]:
    lengths = {len(shapes) for shapes in mirrored.of_containers}
    for held in all_objects() if lengths else ():
        kind = type(held)
        if (kind in _LISTS or kind in _DICTIONARIES) and len(held) in lengths:
            values = tuple(dict.values(held) if kind in _DICTIONARIES else held)
            if (
                all(issubclass(type(each), torch.Tensor) for each in values)
                and _are_copies(values, mirrored.of_containers, not_copies)
                and _are_near(values, mirrored.of_containers[_shapes(values)])
            ):
                yield from values


def _are_near(tensors: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> bool:
    """By less than half of what these weights are: of the largest ones, the first row. Of what is shared among ranks that
    is this rank's part: nothing is sent."""
    pairs = sorted(zip(tensors, weights, strict=True), key=lambda pair: -pair[1].numel())[:_NUM_LOOKED_AT]
    try:
        rows = [(_first_of(one), _first_of(other)) for one, other in pairs]
    except Exception:
        return False  # an exotic tensor, or one that is elsewhere just now
    if any(one.shape != other.shape for one, other in rows):  # one of them is not shared among ranks
        return False
    away = sum(float((one - other).square().sum()) for one, other in rows)
    return away < _NEAR**2 * sum(float(weight.square().sum()) for _, weight in rows)


@torch.no_grad()
def _first_of(tensor: torch.Tensor) -> torch.Tensor:
    part = next(plain_tensors(tensor))
    if type(part).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise ValueError("its values may be on other ranks, which need not be here")
    part = part.detach()
    # Of a sharded model's parameters there may be the shape alone.
    if part.untyped_storage().nbytes() < part.numel() * part.element_size():
        raise ValueError("it is not there")
    while part.dim() > 1 and part.numel():
        part = part[0]
    return part[:_MOST_LOOKED_AT].to("cpu", torch.float64)


def _are_copies(tensors: Sequence[torch.Tensor], mirrored: Container[_Shapes], not_copies: Set[int]) -> bool:
    return (
        _shapes(tensors) in mirrored
        and not_copies.isdisjoint(map(id, tensors))
        and all(each.is_leaf and each.grad is None for each in tensors)
    )


def _around(roots: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Modules that hold one of these, and more beside it: of a distribution whose methods call a network the script keeps
    the state dictionary, and not the network's."""
    known = set(map(id, roots))
    seen = set(known)
    left = outermost_modules(torch.nn.Module)
    while left:
        module = left.pop()
        if id(module) not in seen and any(id(inner) in known for inner in modules_of(module)):
            yield module
            left += children_of(module)
        seen.add(id(module))


def _tensors_of(root: torch.nn.Module, kind: str) -> list[torch.Tensor]:
    """All parameters, or buffers, each once."""
    found = {
        id(tensor): tensor
        for module in modules_of(root)
        for tensor in vars(module).get(kind, {}).values()
        if isinstance(tensor, torch.Tensor)
    }
    return list(found.values())


def _kept_in_state(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Of the module itself, in the order of a state dictionary."""
    own = vars(module)
    passing = own.get("_non_persistent_buffers_set", ())
    kept = [*own.get("_parameters", {}).values()]
    kept += [each for name, each in own.get("_buffers", {}).items() if name not in passing]
    yield from (each for each in kept if isinstance(each, torch.Tensor))
