"""The units of a live model with their flats, as a schedule has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memadvisor.engines.script.live import LiveModel, LiveUnit
from memadvisor.engines.sharding.flat import Flat, Slot, UnitState
from memadvisor.run.torch_names import dtype_name
from memadvisor.schedule import Schedule


def build_units(model: LiveModel, schedule: Schedule, rank: int, num_ranks: int) -> dict[str, UnitState]:
    """The units of a model with their flats, which are numbered through."""
    stages = {unit.name: unit.stage_on(schedule.num_ranks) for unit in schedule.units}
    is_alone = schedule.num_ranks == 1
    units: dict[str, UnitState] = {}
    count = 0
    for live in model.units:
        # On one rank, units that lie nowhere else are the script's own.
        is_ours = not is_alone or stages[live.name] > 0
        flats = flats_of(live, stages[live.name], rank, num_ranks, count, schedule) if is_ours else []
        count += len(flats)
        units[live.name] = UnitState(live, stages[live.name], flats)
    return units


def flats_of(
    unit: LiveUnit, stage: int, rank: int, num_ranks: int, first_index: int, schedule: Schedule
) -> list[Flat]:
    """Group a unit's parameters into flats. Frozen ones are sharded in stage 3 alone."""
    groups: dict[tuple[torch.dtype, torch.device, bool], list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in unit.parameters:
        if parameter.requires_grad or stage == 3:
            key = (parameter.dtype, parameter.device, parameter.requires_grad)
            groups.setdefault(key, []).append((name, parameter))
    precision, compression = schedule.precision, schedule.compression
    flats: list[Flat] = []
    for (dtype, device, trainable), members in groups.items():
        name = dtype_name(dtype)
        flat = Flat(
            unit=unit.name,
            index=first_index + len(flats),
            stage=stage,
            rank=rank,
            num_ranks=num_ranks,
            dtype=_dtype_of(precision.of_optimizer(name)) if stage and trainable else dtype,
            script_dtype=dtype,
            param_dtype=_dtype_of(precision.of_parameter(name) if stage == 3 else name),
            reduce_dtype=_dtype_of(precision.of_reduction(name) if stage >= 2 else name),
            gather_bits=compression.gather_bits_of(name) if stage == 3 else None,
            reduce_bits=compression.reduce_bits_of(name) if stage >= 2 else None,
            device=device,
            trainable=trainable,
            num_elements=sum(parameter.numel() for _, parameter in members),
        )
        _add_slots(flat, members)
        flats.append(flat)
    return flats


def _dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _add_slots(flat: Flat, members: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    start = 0
    for name, parameter in members:
        end = start + parameter.numel()
        stride = parameter.stride() if _is_dense(parameter) else _contiguous_stride(parameter.shape)
        flat.slots.append(
            Slot(
                name=name,
                parameter=parameter,
                shape=parameter.shape,
                stride=tuple(stride),
                start=start,
                end=end,
                index=len(flat.slots),
                flat=flat,
            )
        )
        start = end


def _is_dense(parameter: torch.Tensor) -> bool:
    # A weight in channels_last keeps its strides, and with them the kernels that are chosen for it.
    return bool(torch.ops.aten.is_non_overlapping_and_dense(parameter.detach()))


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
