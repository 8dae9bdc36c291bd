"""Scores of all rows at once, where a loss needs a chunk of them at a time (analyzers/chunked_step.py)."""

from __future__ import annotations

from memadvisor.analyzers.chunked_step import chunked_step
from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.analyzers.script_changes.lives import changed_lives
from memadvisor.chunked_loss import ChunkedLoss

_PLAN = "Have a plan make it for some rows at a time: `--chunked-loss auto` of `advise` and `run`; or, from"
_CALL = " torch 2.13 on, call `torch.nn.functional.linear_cross_entropy(..., options=torch.nn.LinearCrossEntropyOptions())`."


def chunked_loss(facts: Facts) -> ScriptChange | None:
    chunked = chunked_step(facts.rank, facts.step, ChunkedLoss())
    if chunked is None:
        return None
    layer = chunked.layer
    saved_bytes = facts.peak_saved_bytes(changed_lives(facts.rank, chunked.without_scores()))
    if not facts.is_worth(saved_bytes):
        return None
    return ScriptChange(
        kind="chunked_loss",
        seen=f"All of the output of {layer.name}, {layer.num_rows} x {layer.num_classes}, is there at once, with what the loss makes "
        "of it and its gradient.",
        change=f"{_PLAN if _may_be_planned(facts) else 'From'}{_CALL} That layer's product is done once more.",
        peak_saved_bytes=saved_bytes,
        effect="not bit for bit the same",
    )


def _may_be_planned(facts: Facts) -> bool:
    """Whether the layer is whole on this rank, until the loss."""
    return not (facts.rank.shard_groups or facts.rank.pipeline_stages or facts.rank.tensor_parallel)
