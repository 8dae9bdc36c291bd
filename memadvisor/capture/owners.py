"""The model that a module is a part of which the script calls by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from memadvisor.run.cut import unwrap
from memadvisor.run.living import living, living_modules

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)  # of a model whose methods the script calls


def trained_owner(part: torch.nn.Module, known: Collection[int]) -> torch.nn.Module | None:
    """The smallest module around `part` and a model of these ids, all trained by optimizers that live; None: there is none."""
    owners: list[tuple[int, torch.nn.Module]] = []
    for module in living_modules(torch.nn.Module):
        inside = {id(each) for each in module.modules()}
        if id(part) in inside and inside & (set(known) - {id(module)}) and unwrap(module) is module:
            owners.append((len(inside), module))
    trained = {
        id(parameter)
        for optimizer in living(torch.optim.Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    found = [
        owner
        for _, owner in sorted(owners, key=lambda entry: entry[0])
        if all(id(parameter) in trained for parameter in owner.parameters() if parameter.requires_grad)
    ]
    return next((owner for owner in found if not isinstance(owner, _LISTS)), next(iter(found), None))


def frozen_owner(part: torch.nn.Module, known: Collection[int]) -> torch.nn.Module | None:
    """The largest module around `part` in which nothing is trained either and which is no model of these ids; None where it
    is `part` itself, or one that a wrapper is around."""
    around = [
        (len(inside), module)
        for module in living_modules(torch.nn.Module)
        if id(part) in (inside := {id(each) for each in module.modules()})
        and not any(parameter.requires_grad for parameter in module.parameters())
    ]
    owner = max(around, key=lambda entry: entry[0], default=(0, part))[1]
    return None if owner is part or id(owner) in known or unwrap(owner) is not owner else owner


def parts_beside(
    module: torch.nn.Module, known: Collection[int], wanted: Collection[int]
) -> Iterator[torch.nn.Module]:
    """Inside a module around models of these ids: the largest parts that hold parameters `wanted`, and none of the models."""
    for part in module.children():
        if id(part) in known or not any(id(parameter) in wanted for parameter in part.parameters()):
            continue
        if any(id(each) in known for each in part.modules()):
            yield from parts_beside(part, known, wanted)
        else:
            yield part
