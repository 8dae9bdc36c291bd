"""What a script's own FSDP2 leaves to the last micro-batch of a step."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.schedule import Action, ActionKind, Point, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LateSharding:
    """What is done in the last micro-batch of a step alone, as the script has told FSDP2.

    `reduces`: gradients are reduced to shards (`set_requires_gradient_sync`), which until then are whole. `sums`: shards are
    summed across groups of ranks (`set_requires_all_reduce`). `frees`: parameters are freed after the backward
    (`set_reshard_after_backward`), so the forward of the next micro-batch finds them.
    """

    reduces: bool = False
    sums: bool = False
    frees: bool = False

    def holds_back(self, action: Action, point: Point, *, is_last: bool) -> bool:
        """Whether an action of a schedule is not done here."""
        if is_last:
            return False
        if action.kind is ActionKind.REDUCE:
            return self.reduces or (self.sums and action.ranks is Ranks.ACROSS)
        return self.frees and action.kind is ActionKind.RELEASE and point in _AFTER_BACKWARD


NOTHING_LATE = LateSharding()
_AFTER_BACKWARD = (Point.AFTER_BACKWARD, Point.BACKWARD_ENDS)
