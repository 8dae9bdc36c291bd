"""The recorded rank as it would be with torch's fused updates (memadvisor/fused_updates.py): no optimizer's temporaries.

How long they take is known where this machine's rate was measured (`memadvisor calibrate`): AdamW's on float32 matrices
past the caches, which moves 28 B of an element: parameter, gradient, both moments, and all but the gradient back. A
fused update is bound by that traffic, so others take as much less or more as they move. Small models stay in caches and
are faster. Where nothing was measured their time is the recorded one's, which is above it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from memadvisor.errors import UsageError
from memadvisor.fused_updates import FUSED_OPTIMIZERS, has_fused_update
from memadvisor.hardware.hardware import OptimizerRate
from memadvisor.run.records import Operator, Storage
from memadvisor.run.run import RankRun

_ADAMW_BYTES = 28  # of a float32 element


def with_fused_updates(rank: RankRun) -> RankRun:
    """Raises UsageError where its optimizers have none, or run one already."""
    kinds = sorted({state.optimizer for state in rank.optimizer_states if state.optimizer is not None})
    others = [kind for kind in kinds if not has_fused_update(kind)]
    if others or not kinds:
        what = (
            f"{others[0].rsplit('.', 1)[-1]} has no fused update"
            if others
            else "this run tells of no optimizer"
        )
        raise UsageError(
            f"--fused-updates is for torch's {', '.join(FUSED_OPTIMIZERS)}, and {what}"
            f"{'' if others else ', as one without states is not recorded'}.",
            hint="leave it out.",
        )  # fmt: skip
    if is_fused(rank.operators):
        raise UsageError("The script's updates are fused already.", hint="leave out --fused-updates.")
    return replace(rank, storages=tuple(row for row in rank.storages if not passes_in_update(row)))


def is_fused(operators: Iterable[Operator]) -> bool:
    """Whether an optimizer runs torch's fused update."""
    return any(row.phase == "optimizer" and row.name.startswith("aten::_fused_") for row in operators)


def passes_in_update(row: Storage) -> bool:
    """Whether an optimizer has it for no longer than its step."""
    return row.phase == "optimizer" and row.category == "temporary"


def fused_seconds(rank: RankRun, rates: Sequence[OptimizerRate]) -> float | None:
    """Of one update of all that the optimizers have; None where nothing was measured."""
    measured = [row for row in rates if (row.optimizer, row.implementation) == ("AdamW", "fused")]
    if not measured:
        return None
    updated_bytes = sum(row.size_bytes for row in rank.parameters if row.in_optimizer and not row.tied_to)
    state_bytes = sum(row.size_bytes for row in rank.optimizer_states)
    moved_bytes = 3 * updated_bytes + 2 * state_bytes
    return moved_bytes / (_ADAMW_BYTES * measured[0].elements_per_s)
