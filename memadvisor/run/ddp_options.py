"""What a DistributedDataParallel may be told that no engine does in its place: such ranks get plans of what all of them
recompute alike, which leave it as it is."""

from __future__ import annotations

from typing import Any


def options_left_to_ddp(ddp: Any) -> str | None:
    """The first of them, in words; None where there is none."""
    found = {
        "`mixed_precision` of DistributedDataParallel": ddp.mixed_precision is not None,
        "`delay_all_reduce_named_params` of DistributedDataParallel": bool(ddp._delay_all_reduce_params),
        "parameters that DistributedDataParallel ignores": bool(ddp.parameters_to_ignore),
        "optimizers inside the backward of DistributedDataParallel (`_apply_optimizer_in_backward`)": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()
        ),
    }
    return next((what for what, is_there in found.items() if is_there), None)
