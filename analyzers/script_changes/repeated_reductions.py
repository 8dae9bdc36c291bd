"""Gradients that all ranks sum in every backward of a step, where once is enough.

Sums over ranks and over micro-batches commute: under `no_sync` DistributedDataParallel adds micro-batches up on each
rank, and sums over the ranks in the last backward alone (torch/nn/parallel/distributed.py).
"""

from __future__ import annotations

from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.units import format_bytes

_ALIKE = 0.01  # messages of two backwards, as a share of the larger


def repeated_reductions(facts: Facts) -> ScriptChange | None:
    backwards = facts.spans("backward")
    if not facts.rank.process.has_ddp or len(backwards) < 2:
        return None
    sent_bytes = [
        sum(
            call.size_bytes
            for call in facts.rank.collectives
            if call.step == facts.step.index
            and call.operation == "all_reduce"
            and backward.start_s <= call.issue_s < backward.end_s
        )
        for backward in backwards
    ]
    largest_bytes = max(sent_bytes)
    if min(sent_bytes) <= 0 or min(sent_bytes) < (1 - _ALIKE) * largest_bytes:
        return None
    spared_bytes = sum(sent_bytes) - largest_bytes
    traffic = facts.communication
    saved_s = None
    if traffic is not None and traffic.exposed_s is not None and traffic.bytes:
        saved_s = traffic.exposed_s * spared_bytes / traffic.bytes
    return ScriptChange(
        kind="repeated_reductions",
        seen=f"Gradients are summed over the ranks in each of the step's {len(backwards)} backwards: "
        f"{format_bytes(sum(sent_bytes))}, where {format_bytes(largest_bytes)} would do.",
        change="Run all micro-batches of a step but the last under `model.no_sync()`.",
        step_saved_s=saved_s,
        is_at_most=True,
        effect="summed in another order",
    )
