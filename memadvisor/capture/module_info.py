"""What is known of each module of a model: its name, and the unit that its work belongs to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from memadvisor.capture.samples import takes_length_first
from memadvisor.run.own_forwards import why_not_wrapped
from memadvisor.run.records import Parameter
from memadvisor.run.torch_names import dtype_name


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What the hooks need to know of a module, found by its id."""

    name: str
    unit: str
    is_unit: bool  # the topmost module of a unit
    is_root: bool
    is_plain: bool = False  # inside a unit: it has no span of its own
    is_of_model: bool = True  # else a loss function, or made inside a forward
    is_shared: bool = False  # without parameters, in several units: it works for the one that calls it
    is_around: bool = (
        False  # its call holds steps of the training (around.py), or it has parts in other processes
    )
    is_own_forward: bool = False  # as of run.records.Module, when it was first met
    may_be_length_first: bool = False  # it holds a layer that takes [length, samples, ...]
    model: str = ""  # the name of the model that it is of
    has_own_span: bool = (
        False  # a unit; of models those that a loop calls whole, which have one beside the forward's
    )


def unnamed_info(
    module: torch.nn.Module, around: Sequence[ModuleInfo] = (), *, is_around: bool = False
) -> ModuleInfo:
    """Of a loss function, or a module made inside a forward: its work belongs to whatever encloses it. Or of one that
    `is_around` the model, or another process's, whose own call is none to be told of."""
    unit = around[-1].unit if around else ""
    name = f"({type(module).__name__})"
    return ModuleInfo(name, unit, False, False, is_of_model=False, is_around=is_around)


def module_infos(
    root: torch.nn.Module, prefix: str, units: Mapping[str, str], looped: Collection[str] = ()
) -> Iterator[tuple[torch.nn.Module, ModuleInfo]]:
    """Of every module of a model, once, under its first name; `units` are `run.cut.cut_units`'s with these `looped`."""
    places: dict[int, set[str]] = {}
    length_first: set[str] = set()
    for name, module in root.named_modules(prefix=prefix, remove_duplicate=False):
        if takes_length_first(module):
            parts = name.split(".")
            length_first |= {prefix, *(".".join(parts[:end]) for end in range(1, len(parts) + 1))}
        places.setdefault(id(module), set()).add(units.get(name, prefix))
    for name, module in root.named_modules(prefix=prefix):
        unit = units.get(name, prefix)
        is_plain = unit != name and module is not root
        is_bare = is_plain and not any(True for _ in module.parameters())
        is_shared = is_bare and len(places[id(module)]) > 1
        yield (
            module,
            ModuleInfo(
                name,
                unit,
                is_unit=unit == name,
                has_own_span=unit == name and (module is not root or name in looped),
                is_root=module is root,
                is_plain=is_plain,
                is_shared=is_shared,
                is_own_forward=bool(why_not_wrapped(name, module)),
                may_be_length_first=name in length_first,
                model=prefix,
            ),
        )


def new_prefix(infos: Iterable[ModuleInfo], number: int) -> tuple[str, int]:
    """ "" for the first model, then a name that no module of the `number` models before has; and how many it makes."""
    taken = {info.name.partition(".")[0] for info in infos} if number else set()
    while number and f"model{number}" in taken:
        number += 1
    return f"model{number}" if number else "", number + 1


def parameter_row(
    name: str, unit: str, parameter: torch.Tensor, shape: torch.Size, is_trained: bool, tied_to: str
) -> Parameter:
    return Parameter(
        name=name,
        unit=unit,
        shape=str(list(shape)),
        dtype=dtype_name(parameter.dtype),
        num_elements=shape.numel(),
        size_bytes=0 if parameter.device.type == "meta" else shape.numel() * parameter.element_size(),
        requires_grad=is_trained,
        tied_to=tied_to,
    )
