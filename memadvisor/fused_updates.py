"""Updates in one kernel in place of many small operators: which of torch's optimizers have one. Pure data.

`fused=True` runs the same formula in one pass over parameters, gradients and states. It needs none of the temporaries of
`foreach`, which are as large as all parameters and are the default on GPUs, nor those of one parameter after another, the
default on CPUs (torch/optim/adam.py, adamw.py, sgd.py). Only the roundings in between are others.
"""

from __future__ import annotations

# Adagrad has one for CPUs alone.
FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD")


def has_fused_update(optimizer: str) -> bool:
    """By the full name of the class, `torch.optim.adamw.AdamW`."""
    module, _, name = optimizer.rpartition(".")
    return module.startswith("torch.optim") and name in FUSED_OPTIMIZERS


def fused_updates_text() -> str:
    """What of a training is not the same, in words."""
    return (
        f"{', '.join(FUSED_OPTIMIZERS[:-1])} and {FUSED_OPTIMIZERS[-1]} of torch update in one kernel (fused=True), whose "
        "formula is the same, but not its intermediate roundings. Losses may differ in their last digits."
    )
