"""Trainings whose weights no optimizer of torch.optim updates, and trainings that other processes do."""

from __future__ import annotations

import gc
import resource

import torch

_WORTH_SAYING_S = 1.0


class BackwardSteps:
    """Whether backward passes stand for training steps: where nothing could step that torch.optim knows of.

    Decided from the second pass on, as an optimizer may be made after a first trial pass. Looking through
    all objects takes some 30 ms, so where optimizers exist that have not stepped yet (gradients are being
    accumulated, or they never will), it is done again after 4, 8, 16, ... passes only.
    """

    NOTE = (
        "No optimizer of torch.optim was found: each backward pass counts as one step, which ends with the pass "
        "(the first step holds two). What updates the weights counts as outside, in the next step."
    )

    def __init__(self) -> None:
        self.num_passes = 0
        self.has_begun = False

    def after_pass(self) -> bool:
        """Count a pass; True where it is the one that shows it."""
        self.num_passes += 1
        is_power_of_two = self.num_passes & (self.num_passes - 1) == 0
        if self.has_begun or self.num_passes < 2 or not is_power_of_two or _some_optimizer_exists():
            return False
        self.has_begun = True
        return True


def _some_optimizer_exists() -> bool:
    # type(), since isinstance() would ask objects for their __class__, and wake lazy ones up.
    return any(issubclass(type(each), torch.optim.Optimizer) for each in gc.get_objects())


def what_was_seen(*, has_model: bool, num_passes: int) -> str:
    """The clause behind "no training step was seen"."""
    seen = "no model was called"
    if has_model:
        passes = (
            f"{num_passes} backward pass{'' if num_passes == 1 else 'es'}"
            if num_passes
            else "no backward pass"
        )
        seen = f"a model was called, with {passes}, but no optimizer stepped"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    elsewhere_s = used.ru_utime + used.ru_stime
    if elsewhere_s < _WORTH_SAYING_S:
        return seen
    return f"{seen} in this process; processes that it started took {elsewhere_s:.0f} s of processor time, unrecorded"
