"""Whether the script leaves gradients and parameters alone between its last backward and the optimizer step.

Units can be updated inside the backward only if it does (docs/engines/optimizers.md). The engine finds that out on the live
training too; here it is read off the traced step, so that no plan counts on what the script will not let be.
"""

from __future__ import annotations

from memadvisor.cost.owners import is_elementwise
from memadvisor.run.run import RankRun

# An operator that moves no more looks at single numbers, as `loss.item()` does.
_SINGLE_NUMBERS_BYTES = 16


def leaves_gradients_alone(rank: RankRun) -> bool:
    """False also where the traced step does not tell: without an optimizer step, or without operators and their bytes.

    Nothing but single numbers may be touched between the last backward and the first optimizer step, no gradient of
    the step before may be used (it is dropped, and not zeroed, clipped or logged), and optimizers must update
    element by element.
    """
    step = rank.traced_step
    if step is None or not rank.operators:
        return False
    spans = [span for span in rank.spans if span.step == step.index]
    steps_s = [span.start_s for span in spans if span.kind == "optimizer"]
    backwards_s = [span.end_s for span in spans if span.kind == "backward"]
    if not steps_s or not backwards_s or max(backwards_s) > min(steps_s):
        return False
    between = [op for op in rank.operators if max(backwards_s) <= op.start_s < min(steps_s)]
    looks = any(
        operator.read_bytes is None
        or operator.written_bytes is None
        or operator.read_bytes + operator.written_bytes > _SINGLE_NUMBERS_BYTES
        for operator in between
    )
    uses_old = any(
        storage.category == "gradient" and storage.phase == "baseline" and storage.last_use_s is not None
        for storage in rank.storages
    )
    return updates_in_pieces(rank) and not looks and not uses_old


def updates_in_pieces(rank: RankRun) -> bool:
    """Whether all optimizers update element by element."""
    return all(
        state.optimizer is not None and is_elementwise(state.optimizer) for state in rank.optimizer_states
    )
