"""What to change first: the checkpoint and the changes of the script that save most, in a few words each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memadvisor.analyzers.checkpointing import CheckpointedModule, Checkpointing
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.units import format_bytes, format_seconds

# A share of the peak, or of a step, below which a change is not among the first.
WORTH_NAMING = 0.05

# What to do, by the kind of the change; what was seen and the full words stand in the change itself.
_IN_SHORT = {
    "attention_scores": "attention by `scaled_dot_product_attention`",
    "autocast": "compute in bfloat16: `--autocast bf16`",
    "bucket_views": "`DistributedDataParallel(..., gradient_as_bucket_view=True)`",
    "chunked_loss": "logits and loss for some rows at a time: `--chunked-loss auto`",
    "fused_updates": "the optimizer with `fused=True`",
    "held_results": "`del` results once they have been used",
    "loader_workers": "more workers of the `DataLoader`",
    "repeated_reductions": "`model.no_sync()` in all micro-batches of a step but the last",
    "stale_gradients": "`zero_grad` before the forward",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstChange:
    """What to do, and what that alone is predicted to do to the peak and to a step's time.

    `effect`: how results change; "" where they do not. `share`: of the peak or of a step, whichever it saves more of.
    Exactly one of `checkpoint` and `script_change` is what it was found as.
    """

    what: str
    saved_in_words: str
    effect: str
    share: float
    checkpoint: CheckpointedModule | None = None
    script_change: ScriptChange | None = None

    @property
    def in_words(self) -> str:
        """`checkpoint blocks.* (6 Block)`; with what happens to results, where they change."""
        return f"{self.what} (results: {self.effect})" if self.effect else self.what


def first_changes(
    checkpoints: Checkpointing | None,
    changes: Sequence[ScriptChange],
    peak_bytes: int,
    step_time_s: float | None,
) -> tuple[FirstChange, ...]:
    """Those that save a share worth a reader's first minute: what saves most first, and what gives up digits last."""
    found = [
        FirstChange(
            what=_IN_SHORT[change.kind],
            saved_in_words=change.saved_in_words,
            effect=change.effect,
            share=change.share(peak_bytes, step_time_s),
            script_change=change,
        )
        for change in changes
        if change.saved_in_words and change.kind in _IN_SHORT
    ]
    best = () if checkpoints is None else checkpoints.best(1)
    found += [_of_checkpoint(row, peak_bytes) for row in best]
    worth = [each for each in found if each.share >= WORTH_NAMING]
    return tuple(sorted(worth, key=lambda each: (_is_lossy(each), -each.share)))


def _of_checkpoint(row: CheckpointedModule, peak_bytes: int) -> FirstChange:
    saved_bytes = row.peak_saved_bytes or 0
    count = f"{len(row.modules)} " if len(row.modules) > 1 else ""
    time = "" if row.extra_time_s is None else f", step +{format_seconds(row.extra_time_s)}"
    return FirstChange(
        what=f"checkpoint {row.name or '(model)'} ({count}{row.type_name})",
        saved_in_words=f"peak -{format_bytes(saved_bytes)}{time}",
        effect="",
        share=saved_bytes / peak_bytes if peak_bytes else 0.0,
        checkpoint=row,
    )


def _is_lossy(change: FirstChange) -> bool:
    return change.script_change is not None and change.script_change.is_lossy
