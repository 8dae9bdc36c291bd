"""What FSDP2 keeps of a module that a script has called `fully_shard` on: capture and engines ask, without torch."""

from __future__ import annotations

from typing import Any


def param_groups(module: Any) -> list[Any]:
    """Its parameters as they are gathered together, those of no module inside it; until torch 2.12 one group at most."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    return list(groups)
