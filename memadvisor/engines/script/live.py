"""The script's live model as units: the same cut that capture and planner use, with the modules in hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memadvisor.cuda_graphs import is_replayed
from memadvisor.errors import PlanError
from memadvisor.plan import fingerprint
from memadvisor.run.cut import cut_units, module_tree, unwrap
from memadvisor.run.fully_sharded import param_groups
from memadvisor.run.looped_blocks import looped_blocks_of
from memadvisor.run.records import Unit
from memadvisor.run.torch_names import dtype_name


@dataclass(frozen=True, slots=True, eq=False)
class LiveUnit:
    """A unit and the parameters that it owns; a tied parameter belongs to the unit that comes first."""

    row: Unit
    module: torch.nn.Module
    parameters: tuple[tuple[str, torch.nn.Parameter], ...]

    @property
    def name(self) -> str:
        return self.row.name


@dataclass(frozen=True, slots=True, eq=False)
class LiveModel:
    """`uses`: for each module (by id), the names of the units whose parameters its call needs.

    A module needs the unit that it is part of, and those that own a tied parameter of its own.
    """

    root: torch.nn.Module
    units: tuple[LiveUnit, ...]
    uses: dict[int, tuple[str, ...]]
    name: str = ""

    @property
    def rows(self) -> list[Unit]:
        return [unit.row for unit in self.units]

    @property
    def parameter_bytes(self) -> int:
        return sum(unit.row.parameter_bytes for unit in self.units)


def read_model(model: torch.nn.Module, model_name: str = "", planned: Collection[str] = ()) -> LiveModel:
    """Cut a live model into units, in order of definition. Units that own no parameter are left out.

    The units' names begin with the model's; those of parameters are the model's own. `planned`: the names of all units, where
    a plan was made of a recorded model: blocks that a loop calls are told by these.
    """
    root = unwrap(model)
    tree = module_tree(root, model_name)
    unit_of = cut_units(tree, looped_blocks_of(tree, planned))
    modules = dict(root.named_modules(prefix=model_name))
    owned: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    owner: dict[int, str] = {}
    for name, module in modules.items():
        inside = name[len(model_name) + 1 :] if model_name else name
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in owner:
                full = f"{inside}.{parameter_name}" if inside else parameter_name
                owner[id(parameter)] = unit_of[name]
                owned.setdefault(unit_of[name], []).append((full, parameter))
    uses: dict[int, tuple[str, ...]] = {}
    for name, module in modules.items():
        names = [unit_of[name]] if unit_of[name] in owned else []
        names += [owner[id(parameter)] for parameter in module.parameters(recurse=False)]
        if names:
            uses[id(module)] = tuple(dict.fromkeys(names))
    shared = {
        user for name, module in modules.items() for user in uses.get(id(module), ()) if user != unit_of[name]
    }
    units = tuple(_live_unit(name, modules[name], owned[name], name in shared) for name in owned)
    return LiveModel(root=root, units=units, uses=uses, name=model_name)


def _live_unit(
    name: str,
    module: torch.nn.Module,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    is_shared: bool,
) -> LiveUnit:
    sizes = [parameter.numel() * parameter.element_size() for _, parameter in parameters]
    trainable = [
        size for size, (_, parameter) in zip(sizes, parameters, strict=True) if parameter.requires_grad
    ]
    row = Unit(
        name=name,
        type_name=type(module).__name__,
        is_block=any(True for _ in module.children()),
        num_parameters=sum(parameter.numel() for _, parameter in parameters),
        parameter_bytes=sum(sizes),
        trainable_bytes=sum(trainable),
        is_shared=is_shared,
    )
    return LiveUnit(row=row, module=module, parameters=tuple(parameters))


def model_fingerprint(model: torch.nn.Module) -> str:
    """The fingerprint of a live model, as the plan's was made from the recorded one.

    What FSDP2 has gathered in its compute dtype counts as the shards are. Of a parameter that tensor parallelism splits,
    this rank's part counts, and of what FSDP2 shards besides, what all of its shards are.
    """
    shared = [
        each
        for module in model.modules()
        if hasattr(module, "_get_fsdp_state")
        for group in param_groups(module)
        for each in group.fsdp_params
    ]
    shards = {
        id(each._unsharded_param): each.sharded_param for each in shared if hasattr(each, "_unsharded_param")
    }
    sizes = {id(each.sharded_param): each._orig_size for each in shared}
    sizes |= {
        id(each._unsharded_param): each._orig_size for each in shared if hasattr(each, "_unsharded_param")
    }
    return fingerprint(
        (
            name,
            str(list(sizes.get(id(parameter), local_part(parameter).shape))),
            dtype_name(shards.get(id(parameter), parameter).dtype),
        )
        for name, parameter in torch.nn.Module.named_parameters(unwrap(model), remove_duplicate=False)
    )


def local_part(value: Any) -> Any:
    """Of a DTensor what this rank has of it; else the value itself."""
    return getattr(value, "_local_tensor", value)


def check_shardable(model: torch.nn.Module, num_stages: int) -> None:
    """Raise PlanError for models that this engine would get wrong."""
    if num_stages == 3 and any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        raise PlanError(
            "ZeRO stage 3 cannot be applied to a model compiled by torch.compile.",
            hint="use --zero 2, or run without torch.compile.",
        )
    for name, module in unwrap(model).named_modules():
        if num_stages and is_replayed(module):  # with the parameters where they lay when it was captured
            raise PlanError(
                f"The forward of {name or 'the model'!r} replays a CUDA graph, whose parameters must stay where they are.",
                hint="run without torch.cuda.make_graphed_callables, or use --zero 0.",
            )
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise PlanError(
                f"{name!r} makes sparse gradients, which this engine cannot reduce.",
                hint="use an embedding with sparse=False, or no plan.",
            )
    for name, parameter in unwrap(model).named_parameters():
        if type(parameter.data) is not torch.Tensor or hasattr(parameter, "device_mesh"):
            raise PlanError(
                f"{name!r} is a {type(parameter.data).__name__}: the script shards its model itself.",
                hint="apply the plan to a script that uses DistributedDataParallel.",
            )
        if parameter.is_complex() or parameter.layout is not torch.strided:
            raise PlanError(
                f"{name!r} is complex or sparse, which this engine cannot shard.", hint="run without a plan."
            )
