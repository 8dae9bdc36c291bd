"""Accelerators joined to nodes, nodes to a cluster; what crosses each tier of links, per accelerator and direction.

Rates are one direction's. Unknown is None; whoever needs it says so and ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.hardware.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """`bytes_per_s`: what one accelerator can send over it while it receives as much. `alpha_s`: one message's latency.
    `num_peers`: of links that go to so many others one by one, without a switch, whose rate is that of all of them together.
    `card_bytes_per_s`: of one network card, where a node has fewer of them than accelerators: what one may have while others
    send nothing; None where each has its own, or it is not known. `reached_share`: of the rate, what rings were measured to
    reach; None where that is not known.
    """

    kind: str
    bytes_per_s: float
    alpha_s: float
    source: str
    num_peers: int | None = None
    card_bytes_per_s: float | None = None
    reached_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`inside`: between accelerators of a node (None where a node has one). `across`: between nodes, an accelerator's
    share of its node's network cards (None on one node). `host`: between an accelerator and its host's memory.
    """

    accelerator: Hardware
    num_nodes: int
    per_node: int
    inside: Link | None
    across: Link | None
    host: Link | None = None

    @property
    def num_accelerators(self) -> int:
        return self.num_nodes * self.per_node
