"""How long tokens take to their experts and back, and what of it another microbatch's layers hide."""

from __future__ import annotations

import math

from memadvisor.architecture import Architecture, Experts
from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.data_parallel import hidden_seconds
from memadvisor.cost.layouts.links import Group
from memadvisor.layout import TrainingStep


def expert_exchange_seconds(
    model: Architecture, step: TrainingStep, layer: int, tokens: float, group: Group
) -> float:
    """Seconds in which a layer's tokens go to their experts and come back, forward or backward."""
    layout = step.layout
    if (
        step.expert_ranks == 1
        or layout.tensor_kind != "1d"
        or model.experts is None
        or not model.has_experts(layer)
    ):
        return 0.0
    # The fullest rank receives, and sends back, most.
    sent = step.software.element_bytes * tokens * model.hidden / layout.stream_ranks * layout.expert_imbalance
    experts, nodes = model.experts, group.nodes
    copies: float = experts.experts_per_token
    if step.software.experts_in_turn:
        copies, most_nodes = (_holders_in_turn(experts, among) for among in (group.size, nodes))
    elif experts.groups > 1:
        most_nodes = experts.groups_per_token * max(1.0, nodes / experts.groups)
    else:
        most_nodes = math.inf
    there = sent * step.software.dispatch_bytes / 2.0
    software = step.software
    once = software.sends_once and not software.experts_in_turn
    return sum(
        group.dispatch_seconds(
            size, copies, most_nodes, to_rank_once=once, leaves_often=software.leaves_often and not once
        )
        for size in (there, sent)
    )


def _holders_in_turn(experts: Experts, among: int) -> float:
    """Of `among` ranks, or nodes, that have the experts between them in order: how many have those of a token, on average,
    where token t is given the k experts from t k on (FakeBalancedGate, nemo_automodel/components/moe/layers.py; DeepEP sends
    a token to each rank once)."""
    held, chosen = max(1, experts.num_experts // among), experts.experts_per_token
    return min(float(among), 1.0 + (chosen - math.gcd(chosen, held)) / held)


def exposed_exchange_seconds(
    step: TrainingStep, compute_s: float, exchange_s: float, known: Coefficients
) -> float:
    """By how much an exchange makes a layer longer, where another microbatch's layer may run meanwhile."""
    if not step.software.expert_overlap or step.layout.num_microbatches == 1:
        return exchange_s
    return min(exchange_s, hidden_seconds(compute_s, exchange_s, known.overlap_slowdown) - compute_s)
