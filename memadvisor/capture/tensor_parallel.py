"""Parameters that the script has split over ranks by itself (`parallelize_module`, `distribute_tensor`): what this rank has.

Such a parameter is a DTensor, and so is one of FSDP2; of the dimensions of its mesh the first ones are FSDP2's. What data
parallelism shares counts whole, as everywhere; of what tensor parallelism splits, this rank's part is its model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from memadvisor.run.cut import innermost
from memadvisor.run.parallel_records import ShardGroup, TensorParallel

_OF_DATA = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")  # in names of a mesh's dimensions


def own_shape(parameter: torch.Tensor, num_data_dims: int = 0) -> torch.Size:
    """The shape of what tensor parallelism leaves this rank of a parameter: its own, where it is not split.

    `num_data_dims`: so many dimensions of its mesh are FSDP2's, or of another data parallelism.
    """
    spec: Any = getattr(parameter, "_spec", None)
    if not _is_dtensor(parameter) or spec is None:
        return parameter.shape
    if not num_data_dims:
        local: torch.Tensor = parameter._local_tensor  # type: ignore[attr-defined]
        return local.shape
    sizes = list(parameter.shape)
    for placement, num_ranks in list(zip(spec.placements, spec.mesh.shape, strict=True))[num_data_dims:]:
        if placement.is_shard():
            sizes[placement.dim] = -(-sizes[placement.dim] // num_ranks)
    return torch.Size(sizes)


def num_data_dims(name: str, parameter: torch.Tensor, groups: Mapping[str, ShardGroup]) -> int:
    """How many dimensions of a parameter's mesh are of data parallelism: FSDP2's, or by their names."""
    if not _is_dtensor(parameter):
        return 0
    group = groups.get(innermost(name, groups) or "") if groups else None
    if group is not None:
        # A mesh may have a dimension of replicas with one of them.
        first_ranks: int = parameter._spec.mesh.shape[0]  # type: ignore[attr-defined]
        return 2 if group.num_replicas > 1 or first_ranks != group.num_ranks else 1
    names = parameter._spec.mesh.mesh_dim_names or ()  # type: ignore[attr-defined]
    return sum(any(word in each.lower() for word in _OF_DATA) for each in names)


def tensor_parallel(
    roots: Iterable[tuple[str, torch.nn.Module]], groups: Mapping[str, ShardGroup]
) -> list[TensorParallel]:
    """Of each model of which a parameter is split: how many ranks hold parts of one."""
    found: dict[str, int] = {}
    for prefix, root in roots:
        for name, parameter in root.named_parameters(prefix=prefix):
            first = num_data_dims(name, parameter, groups)
            if _is_dtensor(parameter):
                spec: Any = parameter._spec  # type: ignore[attr-defined]
                if any(placement.is_shard() for placement in spec.placements[first:]):
                    num_ranks = int(torch.Size(spec.mesh.shape[first:]).numel())
                    found[prefix] = max(num_ranks, found.get(prefix, 1))
    return [TensorParallel(model, num_ranks) for model, num_ranks in found.items() if num_ranks > 1]


def _is_dtensor(tensor: torch.Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
