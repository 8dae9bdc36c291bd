"""How large the buffers of each group of a script's own FSDP2 are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from memadvisor.cost.step import CapturedStep
from memadvisor.precision import bytes_in
from memadvisor.run.parallel_records import ShardGroup
from memadvisor.run.records import Parameter


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Of one group: its gathered parameters, a reduction's input, and this rank's part of what that gives. `parts`: the
    gathered parameters, each of which is allocated by itself. `sum`: the part in the dtype that is summed in, which is
    another buffer than the gradients where that is not theirs (`is_cast`). `summed_in`: that dtype where the script names one;
    `is_summed_apart`: it is another one than autograd's. `forward_ranks`, `gathers_in_backward`: see ShardGroup."""

    full: int
    reduced: int
    shard: int
    sum: int
    parts: tuple[int, ...] = ()
    is_cast: bool = False
    summed_in: str | None = None
    is_summed_apart: bool = False
    forward_ranks: int | None = None
    gathers_in_backward: bool = True


def group_bytes(step: CapturedStep) -> dict[str, GroupBytes]:
    """Sizes of each group of the step."""
    parameters: dict[str, list[Parameter]] = {group.name: [] for group in step.shard_groups}
    for unit in step.units:
        if unit.shard_group in parameters and unit.name in step.states:
            parameters[unit.shard_group].extend(step.states[unit.name].parameters)
    return {group.name: _sizes(group, parameters[group.name]) for group in step.shard_groups}


def _sizes(group: ShardGroup, parameters: Iterable[Parameter]) -> GroupBytes:
    reduced = shard = 0
    parts = []
    is_cast = is_apart = False
    for parameter in parameters:
        dtype, padded = parameter.dtype, padded_bytes(parameter, group.num_ranks)
        computed = group.param_dtype or dtype
        parts.append(bytes_in(padded, dtype, computed))
        if parameter.requires_grad:
            summed_in = group.reduce_dtype or computed
            is_cast |= summed_in != dtype
            is_apart |= summed_in != computed
            reduced += bytes_in(padded, dtype, summed_in)
            shard += shard_bytes(parameter, group.num_ranks)
    return GroupBytes(
        sum(parts),
        reduced,
        shard,
        reduced // group.num_ranks,
        tuple(parts),
        is_cast,
        summed_in=group.reduce_dtype,
        is_summed_apart=is_apart,
        forward_ranks=group.forward_ranks,
        gathers_in_backward=group.gathers_in_backward,
    )


def sharing_ranks(step: CapturedStep) -> dict[str, int]:
    """By unit, how many ranks share each of its parameters; without units that are in no one group."""
    num_ranks = {group.name: group.num_ranks for group in step.shard_groups}
    return {u.name: num_ranks[u.shard_group] for u in step.units if u.shard_group in num_ranks}


def shard_bytes(parameter: Parameter, num_ranks: int) -> int:
    """Bytes of the first rank's shard of a parameter."""
    return padded_bytes(parameter, num_ranks) // num_ranks


def padded_bytes(parameter: Parameter, num_ranks: int) -> int:
    """Bytes with the first dimension rounded up to a multiple of the ranks."""
    shape: list[int] = json.loads(parameter.shape) or [1]
    rows = -(-shape[0] // num_ranks) * num_ranks
    elements = rows * math.prod(shape[1:])
    return elements * (parameter.size_bytes // max(1, parameter.num_elements))
