"""Seconds that a unit's second forward takes in a backward.

The operators until the last tensor is saved take what they took in the first forward; what follows them is run only where
something after it is needed. Beside that, a call that is run again keeps its arguments, random state and casts and has
them again, and each tensor that autograd saves passes through hooks three times: saved in the first run, saved in the
second, and asked for. Where outputs of operators are kept, each operator of both runs is looked at
(engines/activations/kept.py). All that is work of the host: a device that is far enough behind it does not wait for it, and
one that waits for launches anyway does (analyzers/second_runs.py).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondRunCost:
    """Seconds beside the forward itself, of a call and of each tensor that it saves, as measured in the run.

    `operator_s`: of each operator, in either run, of a unit that keeps outputs.
    """

    call_s: float
    tensor_s: float
    operator_s: float = 0.0

    def times(self, share: float) -> SecondRunCost:
        return SecondRunCost(
            call_s=self.call_s * share, tensor_s=self.tensor_s * share, operator_s=self.operator_s * share
        )


# Checkpointing keeps the CPU generator's state of each forward that it will run again, to draw the same
# numbers (torch.utils.checkpoint, preserve_rng_state): a tensor of so many bytes, on the CPU.
RNG_STATE_BYTES = 5056

FREE = SecondRunCost(call_s=0.0, tensor_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondRun:
    """A unit's forward of one micro-batch: all of it, and that until its last tensor is saved, of `num_saved`.

    `num_calls`: how many modules are called one after the other, each under its own random state. `copied_bytes`: of buffers
    that the forward changes (running statistics), copied before it, and once more for the second run; of the latter copies
    autograd saves `saved_copies_bytes`.
    """

    whole_s: float
    until_saved_s: float
    num_saved: int
    num_operators: int = 0
    num_calls: int = 1
    copied_bytes: int = 0
    saved_copies_bytes: int = 0

    def seconds(self, cost: SecondRunCost, *, stops: bool = True) -> float:
        """`stops`: nothing after the last saved tensor is needed."""
        forward_s = self.until_saved_s if stops else self.whole_s
        return forward_s + cost.call_s * self.num_calls + cost.tensor_s * self.num_saved

    def keeping_s(self, cost: SecondRunCost) -> float:
        """What it takes more, in both runs, to keep outputs of some operators: those that are spared are looked at too."""
        return 2 * cost.operator_s * self.num_operators
