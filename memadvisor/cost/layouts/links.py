"""Which links a group of ranks crosses, and how long its collectives take there.

Ranks are numbered tensor innermost, then context, data, pipeline; nodes take them in that order. A group of `size` ranks
that are `stride` apart has `near` of them in each node; every device of a node has its share of the network's cards, so a
ring through the nodes has `near` shares side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memadvisor.cost.collectives import RING_ROUNDS
from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`near`: its ranks in one node. Rates and latencies are those that it reaches."""

    size: int
    near: int
    bytes_per_s: float
    ring_latency_s: float
    tree_latency_s: float
    call_s: float

    def seconds(self, operation: str, size_bytes: float, messages: int = 1) -> float:
        """`size_bytes` in `messages` collectives, one after the other. Every step of a ring waits for its slowest link. A ring (Thakur, Rabenseifner and Gropp 2005); an all-reduce has a tree's latency where that is lower (NCCL)."""
        if self.size == 1 or size_bytes <= 0:
            return 0.0
        rounds = RING_ROUNDS[operation]
        moved = rounds * size_bytes * (self.size - 1) / self.size / self.bytes_per_s
        latency = rounds * self.ring_latency_s
        if operation == "all_reduce":
            latency = min(latency, self.tree_latency_s)
        return moved + messages * (latency + self.call_s)

    def exchange_seconds(self, size_bytes: float) -> float:
        """All-to-all of `size_bytes` that each rank holds: what leaves the node goes over its own share of the network."""
        if self.size == 1 or size_bytes <= 0:
            return 0.0
        return size_bytes * (self.size - 1) / self.size / self.bytes_per_s + self.ring_latency_s + self.call_s


def group_of(cluster: Cluster, size: int, stride: int, coefficients: Coefficients) -> Group:
    """Raises UsageError where the group crosses a link that the cluster does not know."""
    if size == 1:
        return Group(size=1, near=1, bytes_per_s=math.inf, ring_latency_s=0.0, tree_latency_s=0.0, call_s=0.0)
    near = min(size, max(1, cluster.per_node // stride))
    nodes = math.ceil(size / near)
    inside_s = coefficients.inside_alpha_s
    inside_rate = math.inf
    if near > 1:
        if cluster.inside is None:
            raise UsageError(
                "the links inside a node are not known.", hint="give them with inside=... or a cluster file."
            )
        inside_rate = cluster.inside.bytes_per_s * coefficients.inside_share
    rate = inside_rate
    if nodes > 1:
        if cluster.across is None:
            raise UsageError(
                "the network between nodes is not known.", hint="give it with across=... or a cluster file."
            )
        rate = min(inside_rate, near * cluster.across.bytes_per_s * coefficients.across_share)
    return Group(
        size=size,
        near=near,
        bytes_per_s=rate,
        ring_latency_s=(size - 1) * (coefficients.across_alpha_s if nodes > 1 else inside_s),
        call_s=coefficients.collective_s,
        tree_latency_s=2
        * (math.log2(near) * inside_s + math.ceil(math.log2(nodes)) * coefficients.across_alpha_s),
    )


def message_seconds(
    cluster: Cluster, size_bytes: float, stages: int, stride: int, coefficients: Coefficients
) -> list[float]:
    """Of a message from each pipeline stage to the next, and from the last to the first; stages are `stride` ranks apart."""
    if stages == 1:
        return [0.0]
    seconds = []
    for stage in range(stages):
        here, there = stage * stride // cluster.per_node, (stage + 1) % stages * stride // cluster.per_node
        link, share = (
            (cluster.inside, coefficients.inside_share)
            if here == there
            else (cluster.across, coefficients.across_share)
        )
        if link is None:
            raise UsageError(
                "a link that the pipeline crosses is not known.", hint="give it in a cluster file."
            )
        seconds.append(size_bytes / (link.bytes_per_s * share) + coefficients.pipeline_message_s)
    return seconds
