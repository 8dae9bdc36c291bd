"""Where a training step ends: after the last optimizer of the cycle has stepped.

One optimizer: after each of its steps. Several (a GAN's two): the order in which they step is learnt
from the first cycle; a cycle that deviates ends when one of its optimizers is about to step again.
"""

from __future__ import annotations


class StepCycle:
    """Told of every optimizer step by the optimizer's id; says when a training step has ended."""

    def __init__(self) -> None:
        self._this_cycle: list[int] = []
        self._last_of_cycle: int | None = None

    def before(self, optimizer: int) -> bool:
        """True: the training step had ended with the previous optimizer step, unless `after` said so already."""
        if optimizer not in self._this_cycle:
            return False
        self._last_of_cycle = self._this_cycle[-1]
        self._this_cycle = []
        return True

    def after(self, optimizer: int) -> bool:
        """True: this optimizer step ends the training step."""
        self._this_cycle.append(optimizer)
        if self._last_of_cycle is None:
            return len(self._this_cycle) == 1  # as far as is known yet, it is the only optimizer
        if optimizer != self._last_of_cycle:
            return False
        self._this_cycle = []
        return True
