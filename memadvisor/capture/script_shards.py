"""What the script's own FSDP2 (`fully_shard`) does: its groups, and the storages that only its operators can name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from memadvisor.run.fully_sharded import param_groups
from memadvisor.run.parallel_records import ShardGroup
from memadvisor.run.torch_names import dtype_name

# Operators of FSDP2, and which argument of theirs holds what. Gathered parameters are its own storages beneath the
# script's; gradients of them are gone before any optimizer sees them.
NAMESPACE = "fsdp"
_NAMED_ARGUMENTS = {
    "fsdp::split_with_sizes_copy": ("out", "parameter"),
    "fsdp::chunk_cat": ("tensors", "gradient"),
    "fsdp::chunk_cat_mixed_dtype": ("tensors", "gradient"),  # from torch 2.15 on
}


def named_tensors(
    operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[torch.Tensor, str]]:
    """(tensor, category) of what an operator of FSDP2 tells of its arguments."""
    name, category = _NAMED_ARGUMENTS.get(operator, ("", ""))
    for tensor in kwargs.get(name, args[0] if name == "tensors" and args else ()):
        yield tensor, category


def shard_groups(roots: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, ShardGroup]:
    """Every module that the script has given to `fully_shard`, by name, of models by their prefix.

    Those of one call are of one group.
    """
    found: dict[str, ShardGroup] = {}
    first: dict[int, str] = {}  # of a state, which is of all modules of one call
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix):
            if hasattr(type(module), "_get_fsdp_state"):
                group = _read(first.setdefault(id(module._get_fsdp_state()), name), module)
                if group is not None:
                    found[name] = group
    return found


def _read(name: str, module: Any) -> ShardGroup | None:
    """None where this FSDP2 is another than those known here, or the module has no parameters of its own to share."""
    try:
        groups = param_groups(module)
        if not groups:
            return None
        group = groups[0]
        # From torch 2.15 on each parameter has its own, which a policy may choose by the parameter.
        policies = (
            [group.mp_policy] if hasattr(group, "mp_policy") else [p.mp_policy for p in group.fsdp_params]
        )
        mesh, after, policy = group.mesh_info, group.post_forward_mesh_info, policies[0]
        shared = getattr(group, "comm_ctx", None)
        return ShardGroup(
            name=name,
            num_ranks=getattr(mesh, "shard_mesh_size", 1),
            num_replicas=getattr(mesh, "replicate_mesh_size", 1),
            reshards=after is not None,
            param_dtype=_name_of(policy.param_dtype),
            reduce_dtype=_name_of(policy.reduce_dtype),
            offloads=type(group.offload_policy).__name__ != "OffloadPolicy",
            is_plain=len(groups) == 1
            and all(each == policy for each in policies)
            and all(getattr(p.fsdp_placement, "dim", None) == 0 for p in group.fsdp_params),
            forward_ranks=None if after in (None, mesh) else after.shard_mesh_size,
            # All groups of a model share the first one's from its first forward on.
            max_inputs=getattr(shared, "reduce_scatter_max_input_buffers", 1),
            gathers_in_backward=getattr(group, "unshard_in_backward", True),
        )
    except AttributeError:
        return None


def _name_of(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else dtype_name(dtype)
