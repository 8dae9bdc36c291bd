"""Clusters from words: `8xH100,nodes=4,across=400Gbps`; links that nobody names are the vendor's own."""

from __future__ import annotations

import re

from memadvisor.errors import UnknownHardwareError, UsageError
from memadvisor.hardware.catalogue import find_entry
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.links import LINKS, NETWORK_LATENCY_S, DeviceLinks
from memadvisor.hardware.load import load_hardware
from memadvisor.units import parse_rate

_EXAMPLE = "write it as 8xH100, or 8xH100,nodes=4,across=400Gbps,inside=nvlink."
_GPUS = re.compile(r"(?:([0-9]+)\s*[x*]\s*)?(.*[^\s].*)", re.IGNORECASE)


def parse_cluster(text: str) -> Cluster:
    """The cluster meant by `COUNTxDEVICE[,nodes=N][,across=RATE][,inside=nvlink|pcie|RATE]`.

    COUNT accelerators are in each node. `across` is what one accelerator has of its node's network cards (`400Gbps`,
    `50GB/s`), or `8x400Gbps`: all cards of a node. Raises UsageError and UnknownHardwareError.
    """
    first, *rest = (part.strip() for part in text.split(","))
    match = _GPUS.fullmatch(first)
    if match is None:
        raise UsageError(f"{text!r} names no accelerator.", hint=_EXAMPLE)
    per_node = _count("accelerators of a node", match.group(1) or "1")
    options = _options(text, rest)
    num_nodes = _count("nodes", options.get("nodes", "1"))
    accelerator = load_hardware(match.group(2).strip())
    across = None
    if "across" in options:
        rate, card = parse_network(options["across"], per_node)
        across = network_link(rate, "as given with across=", card)
    return make_cluster(
        accelerator,
        num_nodes=num_nodes,
        per_node=per_node,
        inside=_inside(accelerator, options.get("inside"), num_nodes, per_node),
        across=across,
    )


def make_cluster(
    accelerator: Hardware,
    *,
    num_nodes: int,
    per_node: int,
    inside: Link | None = None,
    across: Link | None = None,
) -> Cluster:
    """Links that are None are those of the vendor's own node of such devices, where one node or link is published.

    Raises UnknownHardwareError where a link is needed and nobody publishes it, UsageError for nonsense.
    """
    links = links_of(accelerator)
    if per_node > 1 and inside is None:
        inside = measured_link(accelerator)
    if per_node > 1 and inside is None:
        if links is None:
            raise _unknown(accelerator, "what joins its devices inside a node", "inside=900GB/s")
        inside = links.mesh_of(num_nodes, per_node) or links.pcie
    reference = None if links is None else links.reference
    if num_nodes > 1 and across is None:
        if reference is None or reference.bytes_per_s is None:
            raise _unknown(accelerator, "the network between nodes", "across=400Gbps")
        source = f"{reference.name}: {reference.source}"
        across = network_link(reference.bytes_per_s, source, reference.card_bytes_per_s)
    if num_nodes == 1 and reference is not None and per_node > max(reference.per_node, 16):
        raise UsageError(
            f"no node has {per_node} {accelerator.name}.",
            hint=f"say in how many nodes they are: {reference.per_node}x{accelerator.name},nodes={-(-per_node // reference.per_node)}.",
        )
    return Cluster(
        accelerator=accelerator,
        num_nodes=num_nodes,
        per_node=per_node,
        inside=inside if per_node > 1 else None,
        across=across if num_nodes > 1 else None,
        host=None if links is None else links.host,
    )


def links_of(accelerator: Hardware) -> DeviceLinks | None:
    """What is published of the links of a device of the catalogue."""
    entry = find_entry(accelerator.name)
    return None if entry is None else LINKS[entry.name]


def measured_link(accelerator: Hardware) -> Link | None:
    """What `memadvisor calibrate` found ranks of this machine to send each other in their largest gather; None without it.

    Of n ranks each sends (n-1)/n of the gathered bytes in a ring (Thakur, Rabenseifner and Gropp 2005).
    """
    gathers = [curve for curve in accelerator.collectives if curve.operation == "all_gather"]
    if not gathers or gathers[0].num_ranks < 2:
        return None
    curve = gathers[0]
    sent_bytes = curve.sizes_bytes[-1] * (curve.num_ranks - 1) / curve.num_ranks
    return Link(
        kind="measured collectives",
        bytes_per_s=sent_bytes / curve.durations_s[-1],
        alpha_s=curve.durations_s[0],
        source=accelerator.source,
    )


def network_link(bytes_per_s: float, source: str, card_bytes_per_s: float | None = None) -> Link:
    """A link between nodes, of which each accelerator has so many bytes a second."""
    return Link(
        kind="network",
        bytes_per_s=bytes_per_s,
        alpha_s=NETWORK_LATENCY_S,
        source=source,
        card_bytes_per_s=card_bytes_per_s,
    )


def named_inside(accelerator: Hardware, name: str, num_nodes: int = 1, per_node: int = 1) -> Link:
    """The `nvlink` (or another mesh), or the `pcie`, of a device. Raises UsageError where it has none."""
    links = links_of(accelerator)
    if links is None:
        raise _unknown(accelerator, f"its {name}", "inside=64GB/s")
    if name == "pcie":
        return links.pcie
    mesh = links.mesh_of(num_nodes, per_node)
    if mesh is None:
        raise UsageError(
            f"{accelerator.name} has no mesh of links inside a node.", hint="write inside=pcie, or a rate."
        )
    return mesh


def parse_network(text: str, per_node: int) -> tuple[float, float | None]:
    """Bytes a second for each accelerator, and of one card where they share them: `400Gbps` each, `8x400Gbps` for all of the
    node together."""
    count, separator, _ = text.lower().partition("x")
    if separator and count.strip().isdigit():
        card = parse_rate(text[len(count) + 1 :])
        return int(count) * card / per_node, card
    return parse_rate(text), None


def _inside(accelerator: Hardware, text: str | None, num_nodes: int, per_node: int) -> Link | None:
    if text is None or per_node == 1:
        return None
    name = text.lower()
    if name in ("nvlink", "xgmi", "mesh", "pcie"):
        return named_inside(accelerator, "pcie" if name == "pcie" else "mesh", num_nodes, per_node)
    links = links_of(accelerator)
    usual = None if links is None else (links.mesh or links.pcie)
    return Link(
        kind="link inside a node" if usual is None else usual.kind,
        bytes_per_s=parse_rate(text),
        alpha_s=NETWORK_LATENCY_S if usual is None else usual.alpha_s,
        source="as given with inside=",
    )


def _options(text: str, parts: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in parts:
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or key not in ("nodes", "across", "inside") or not value or key in options:
            raise UsageError(f"{part!r} in {text!r} is not understood.", hint=_EXAMPLE)
        options[key] = value
    return options


def _count(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) >= 1 and len(text) < 8):
        raise UsageError(f"{text!r} is no number of {what}.", hint=_EXAMPLE)
    return int(text)


def _unknown(accelerator: Hardware, what: str, example: str) -> UnknownHardwareError:
    return UnknownHardwareError(
        f"Nothing is published of {accelerator.name} that says {what}.",
        hint=f"give it: --gpus COUNTxDEVICE,{example}, or a cluster file (docs/clusters.md).",
    )
