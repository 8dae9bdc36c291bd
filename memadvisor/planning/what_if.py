"""What would change the best layout: other numbers of nodes, more memory, a faster network; each is searched anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memadvisor.errors import UnknownHardwareError, UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.hardware.clusters import make_cluster
from memadvisor.planning.layout_space import LayoutQuestion
from memadvisor.planning.layouts import search_layouts
from memadvisor.planning.priced_layouts import Priced
from memadvisor.units import format_bytes, format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One other cluster. `cluster` is None where the question cannot be asked, and `reason` says why."""

    words: str
    cluster: Cluster | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`best`: None where no layout is safe, or the question was not asked. `speedup`: how many times as fast the same
    batch is; `gain_per_accelerator`: by what share an accelerator does more of it a second (negative: less). Both are None
    without a layout to compare, or one to compare with.
    """

    change: Change
    best: Priced | None
    speedup: float | None
    gain_per_accelerator: float | None


def what_if(question: LayoutQuestion, now: Priced | None) -> tuple[Outcome, ...]:
    """`now`: the best layout of the question itself. The batch, the model and the code stay as they are."""
    return tuple(_outcome(question, now, change) for change in changes(question.cluster))


def _outcome(question: LayoutQuestion, now: Priced | None, change: Change) -> Outcome:
    if change.cluster is None:
        return Outcome(change=change, best=None, speedup=None, gain_per_accelerator=None)
    found = search_layouts(replace(question, cluster=change.cluster), num_best=1, front_slowdown=1.0)
    best = found.best[0] if found.best else None
    speedup = gain = None
    if best is not None and now is not None:
        speedup = now.estimate.step_time_s / best.estimate.step_time_s
        gain = speedup * (question.cluster.num_accelerators / change.cluster.num_accelerators) - 1
    return Outcome(change=change, best=best, speedup=speedup, gain_per_accelerator=gain)


def changes(cluster: Cluster) -> Iterator[Change]:
    """Half and twice the nodes, twice the memory at the same rates, twice the network between nodes."""
    yield _half(cluster)
    yield twice_the_nodes(cluster)
    accelerator = cluster.accelerator
    if accelerator.memory_bytes is None:
        yield Change(words="twice the memory", cluster=None, reason="the memory is unknown")
    else:
        larger = replace(accelerator, memory_bytes=2 * accelerator.memory_bytes)
        yield Change(
            words=f"twice the memory ({format_bytes(larger.memory_bytes)})",
            cluster=replace(cluster, accelerator=larger),
        )
    if cluster.across is None:
        yield Change(words="twice the network", cluster=None, reason="one node has none")
    else:
        faster = replace(cluster.across, bytes_per_s=2 * cluster.across.bytes_per_s)
        yield Change(
            words=f"twice the network ({format_count(faster.bytes_per_s, 'B/s')} an accelerator)",
            cluster=replace(cluster, across=faster),
        )


def _half(cluster: Cluster) -> Change:
    """Whole nodes: links inside half a node are another machine's."""
    if cluster.num_nodes % 2:
        number = "one node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
        return Change(words="half the accelerators", cluster=None, reason=f"{number} cannot be halved")
    nodes = cluster.num_nodes // 2
    smaller = replace(cluster, num_nodes=nodes, across=cluster.across if nodes > 1 else None)
    return Change(words=f"half the accelerators ({smaller.num_accelerators})", cluster=smaller)


def twice_the_nodes(cluster: Cluster) -> Change:
    nodes = 2 * cluster.num_nodes
    words = f"twice the accelerators ({2 * cluster.num_accelerators})"
    across = cluster.across
    if across is None:
        try:
            across = make_cluster(
                cluster.accelerator, num_nodes=nodes, per_node=cluster.per_node, inside=cluster.inside
            ).across
        except (UsageError, UnknownHardwareError):
            return Change(words=words, cluster=None, reason="no network between nodes is known")
        words += " over the vendor's reference network"
    return Change(words=words, cluster=replace(cluster, num_nodes=nodes, across=across))
