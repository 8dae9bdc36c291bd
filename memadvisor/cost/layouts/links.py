"""Which links a group of ranks crosses, and how long its collectives take there.

Ranks are numbered tensor innermost, then context, data, pipeline; nodes take them in that order. A group of `size` ranks
that are `stride` apart has `near` of them in each node; every device of a node has its share of the network's cards, so a
ring through the nodes has `near` shares side by side. What travels round a ring passes the network once for each node: its
latency is the sum of those of its links, as NCCL counts them (src/graph/tuning.cc), and not that of the slowest at each step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from memadvisor.cost.collectives import RING_ROUNDS
from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.links import PCIE_SHEET

# What NCCL counts with (src/graph/topo.h): 12 GB/s of a bus of generation 3, where the sheet has 16, and 16 GB/s between two
# processors of AMD's (10 of Intel's), which half of a node's eight cards are behind each.
_PCIE_SHARE = 0.75
_BETWEEN_SOCKETS_BYTES_PER_S = 16e9
_CARDS_OF_A_SOCKET = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`near`: its ranks in one node; `nodes`: how many it spans. Rates and latencies are those that it reaches.
    `bytes_per_s` is a ring's, `exchange_bytes_per_s` that of what goes straight from each rank to each; `own_bytes_per_s` what
    each rank has of the network by itself, infinite inside one node, where the others are it.
    """

    size: int
    near: int
    nodes: int
    bytes_per_s: float
    exchange_bytes_per_s: float
    own_bytes_per_s: float
    ring_latency_s: float
    tree_latency_s: float
    tree_share: float
    call_s: float

    def seconds(self, operation: str, size_bytes: float, messages: float = 1) -> float:
        """`size_bytes` in `messages` collectives, one after the other. A ring (Thakur, Rabenseifner and Gropp 2005), whose
        slowest link sets the rate; or, of an all-reduce, a tree where that is quicker (NCCL): it has less latency, and moves
        bytes at `tree_share` of a ring's rate."""
        if self.size == 1 or size_bytes <= 0:
            return 0.0
        rounds = RING_ROUNDS[operation]
        one_round_s = size_bytes * (self.size - 1) / self.size / self.bytes_per_s
        seconds = rounds * (one_round_s + messages * self.ring_latency_s)
        if operation == "all_reduce":
            seconds = min(seconds, rounds * one_round_s / self.tree_share + messages * self.tree_latency_s)
        return seconds + messages * self.call_s

    def exchange_seconds(self, size_bytes: float, messages: float = 1) -> float:
        """All-to-all of `size_bytes` that each rank holds, in `messages`. What leaves the node goes over the rank's own share
        of the network, while the rest goes inside."""
        if self.size == 1 or size_bytes <= 0:
            return 0.0
        return self._exchange(size_bytes, size_bytes * (1 - self.near / self.size), messages)

    def dispatch_seconds(
        self,
        size_bytes: float,
        copies: float,
        most_nodes: float = math.inf,
        *,
        to_rank_once: bool = False,
        leaves_often: bool = False,
    ) -> float:
        """All-to-all of tokens of `size_bytes` in all to the ranks of `copies` experts each. What goes to several ranks of one
        node travels there once, and is copied inside (DeepEP; DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.2): of experts
        chosen evenly a token leaves for (nodes - 1) (1 - (1 - 1/nodes)^copies) nodes. `most_nodes`: that a token may have.
        `to_rank_once`: and to each rank once, of which experts chosen evenly are on as many by the same rule. `leaves_often`:
        once for each expert there, as a plain all-to-all sends rows that were copied before."""
        if self.size == 1 or size_bytes <= 0:
            return 0.0
        others = (self.nodes - 1) * (1 - (1 - 1 / self.nodes) ** copies)
        others = min(others, most_nodes * (1 - 1 / self.nodes))
        if leaves_often:
            others = copies * (1 - 1 / self.nodes)
        if to_rank_once:
            copies = self.size * (1 - (1 - 1 / self.size) ** copies)
        return self._exchange(size_bytes * copies, size_bytes * others, 1)

    def _exchange(self, size_bytes: float, leaving_bytes: float, messages: float) -> float:
        inside_s = size_bytes * (self.size - 1) / self.size / self.exchange_bytes_per_s
        latency_s = messages * (self.ring_latency_s + self.call_s)
        return max(leaving_bytes / self.own_bytes_per_s, inside_s) + latency_s


def group_of(cluster: Cluster, size: int, stride: int, coefficients: Coefficients) -> Group:
    """Raises UsageError where the group crosses a link that the cluster does not know."""
    if size == 1:
        return Group(
            size=1,
            near=1,
            nodes=1,
            bytes_per_s=math.inf,
            exchange_bytes_per_s=math.inf,
            own_bytes_per_s=math.inf,
            ring_latency_s=0.0,
            tree_latency_s=0.0,
            tree_share=1.0,
            call_s=0.0,
        )
    near = min(size, max(1, cluster.per_node // stride))
    nodes = math.ceil(size / near)
    inside_s = across_s = 0.0
    rate = straight = own = math.inf
    if near > 1:
        if cluster.inside is None:
            raise UsageError(
                "the links inside a node are not known.", hint="give them with inside=... or a cluster file."
            )
        inside_s = cluster.inside.alpha_s
        rate = _inside_bytes_per_s(cluster.inside, near, coefficients, is_ring=True)
        straight = _inside_bytes_per_s(cluster.inside, near, coefficients)
    if nodes > 1:
        if cluster.across is None:
            raise UsageError(
                "the network between nodes is not known.", hint="give it with across=... or a cluster file."
            )
        across_s = cluster.across.alpha_s
        own = cluster.across.bytes_per_s * coefficients.across_share
        rate, straight = min(rate, near * own), min(straight, near * own)
    return Group(
        size=size,
        near=near,
        nodes=nodes,
        bytes_per_s=rate,
        exchange_bytes_per_s=straight,
        own_bytes_per_s=own,
        ring_latency_s=(nodes - 1) * across_s + (size - nodes) * inside_s,
        tree_latency_s=2 * (math.log2(near) * inside_s + math.ceil(math.log2(nodes)) * across_s),
        tree_share=coefficients.tree_share,
        call_s=coefficients.collective_s,
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
        link = cluster.inside if here == there else cluster.across
        if link is None:
            raise UsageError(
                "a link that the pipeline crosses is not known.", hint="give it in a cluster file."
            )
        rate = _sending_bytes_per_s(link, cluster.per_node, stride) * coefficients.across_share
        if here == there:
            rate = _inside_bytes_per_s(link, 2, coefficients)
        seconds.append(size_bytes / rate + coefficients.pipeline_message_s)
    return seconds


def _sending_bytes_per_s(link: Link, per_node: int, stride: int) -> float:
    """What a rank has of its node's network where only the ranks of one stage of it, `stride` of them, send to another node: all
    of the cards between them, but no more than a card each."""
    if link.card_bytes_per_s is None:
        return link.bytes_per_s
    shared = link.bytes_per_s * per_node / min(stride, per_node)
    return max(link.bytes_per_s, min(shared, link.card_bytes_per_s))


def _inside_bytes_per_s(link: Link, near: int, coefficients: Coefficients, *, is_ring: bool = False) -> float:
    """What `near` ranks of a node reach over its links. Over a bus of which only the sheet is known, it is less than over a mesh;
    of a mesh without a switch they have the links among each other, of which a ring may be known to reach less."""
    if link.source != PCIE_SHEET:
        there = 1.0 if link.num_peers is None else min(1.0, (near - 1) / link.num_peers)
        known = link.reached_share if is_ring else None
        share = coefficients.inside_share if known is None else known
        return link.bytes_per_s * share * there
    rate = link.bytes_per_s * _PCIE_SHARE
    return rate if near <= _CARDS_OF_A_SOCKET else min(rate, _BETWEEN_SOCKETS_BYTES_PER_S)
