"""Gradients that all ranks sum in every backward of a step, where once is enough.

Sums over ranks and over micro-batches commute: under `no_sync` DistributedDataParallel adds micro-batches up on each
rank, and sums over the ranks in the last backward alone (torch/nn/parallel/distributed.py).
"""

from __future__ import annotations

from collections import Counter

from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.run.records import Span
from memadvisor.units import format_bytes


def repeated_reductions(facts: Facts) -> ScriptChange | None:
    backwards = facts.spans("backward")
    if not facts.rank.process.has_ddp or len(backwards) < 2:
        return None
    updates = facts.spans("optimizer")
    if updates and updates[0].start_s < backwards[-1].end_s:
        return None  # of several optimizers: each backward may be of other parameters
    sent = [_sent(facts, backward) for backward in backwards]
    if not sent[0] or any(messages != sent[0] for messages in sent):
        return None
    once_bytes = sum(size_bytes * number for (_, size_bytes), number in sent[0].items())
    spared_bytes = once_bytes * (len(sent) - 1)
    traffic = facts.communication
    saved_s = None
    if traffic is not None and traffic.exposed_s is not None and traffic.bytes:
        saved_s = traffic.exposed_s * spared_bytes / traffic.bytes
    return ScriptChange(
        kind="repeated_reductions",
        seen=f"Gradients are summed over the ranks in each of the step's {len(backwards)} backwards: "
        f"{format_bytes(once_bytes * len(sent))}, where {format_bytes(once_bytes)} would do.",
        change="Run all micro-batches of a step but the last under `model.no_sync()`.",
        step_saved_s=saved_s,
        is_at_most=True,
        effect="summed in another order",
    )


def _sent(facts: Facts, backward: Span) -> Counter[tuple[str, int]]:
    """How many all-reduces of a unit and size a backward has."""
    return Counter(
        (call.unit, call.size_bytes)
        for call in facts.rank.collectives
        if call.step == facts.step.index
        and call.operation == "all_reduce"
        and backward.start_s <= call.issue_s < backward.end_s
    )
