"""The units of the script's models, with their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from memadvisor.capture.script_shards import shard_groups
from memadvisor.run.cut import innermost
from memadvisor.run.records import Parameter, Unit


def unit_rows(
    rows: Sequence[Parameter], roots: Sequence[tuple[str, torch.nn.Module]], order: Iterable[str]
) -> list[Unit]:
    """In order of first execution; never executed ones come last. `rows`: of all parameters."""
    sizes: dict[str, list[int]] = {}
    for row in rows:
        if not row.tied_to:
            entry = sizes.setdefault(row.unit, [0, 0, 0])
            entry[0] += row.num_elements
            entry[1] += row.size_bytes
            entry[2] += row.size_bytes if row.requires_grad else 0
    blocks, models = {}, {}
    for prefix, root in roots:
        for name, module in root.named_modules(prefix=prefix):
            blocks[name] = (type(module).__name__, any(True for _ in module.children()))
            models[name] = prefix
    unit_of = {row.name: row.unit for row in rows}
    shared = {unit_of[r.tied_to] for r in rows if r.tied_to and unit_of[r.tied_to] != r.unit}
    groups = _groups_of_units(rows, roots)
    ordered = [unit for unit in order if unit in sizes]
    ordered += [unit for unit in sizes if unit not in ordered]
    units = []
    for name in ordered:
        if name in blocks:
            num_parameters, parameter_bytes, trainable_bytes = sizes[name]
            units.append(
                Unit(
                    name,
                    *blocks[name],
                    num_parameters=num_parameters,
                    parameter_bytes=parameter_bytes,
                    trainable_bytes=trainable_bytes,
                    is_shared=name in shared,
                    shard_group=next(iter(own)) if len(own := groups[name]) == 1 else None,
                    model=models[name],
                )
            )
    return units


def _groups_of_units(
    rows: Sequence[Parameter], roots: Sequence[tuple[str, torch.nn.Module]]
) -> dict[str, set[str | None]]:
    """By unit, the names of those that its parameters are in."""
    groups, found = shard_groups(roots), dict[str, set[str | None]]()
    for row in rows:
        if not row.tied_to:
            inside = innermost(row.name, groups)
            found.setdefault(row.unit, set()).add(None if inside is None else groups[inside].name)
    return found
