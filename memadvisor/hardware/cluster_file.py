"""A cluster from a short TOML file:

[cluster]
accelerator = "H100"          # of the catalogue, or a file of `memadvisor calibrate`
nodes = 4
per_node = 8
[inside]                      # each accelerator's link to the others of its node; as published where left out
kind = "NVLink"
rate = "450GB/s"
latency_us = 3.4
[across]                      # between nodes
rate = "400Gbps"              # of one network card
rails = 8                     # network cards of a node; one for each accelerator where left out
oversubscription = 2          # so many times less reaches the other nodes when all send; 1 where left out
latency_us = 9.6
[host]                        # between an accelerator and its host's memory
rate = "64GB/s"
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.clusters import make_cluster
from memadvisor.hardware.links import NETWORK_LATENCY_S, NVLINK_LATENCY_S, PCIE_LATENCY_S
from memadvisor.hardware.load import load_hardware
from memadvisor.json_field import where_broken
from memadvisor.run.files import read_input
from memadvisor.units import parse_rate

_HINT = "docs/clusters.md shows one."
_KEYS = {
    "cluster": ("accelerator", "nodes", "per_node"),
    "inside": ("kind", "rate", "latency_us"),
    "across": ("kind", "rate", "rails", "oversubscription", "latency_us"),
    "host": ("kind", "rate", "latency_us"),
}


def load_cluster(path: str | Path) -> Cluster:
    """The cluster of a file. Raises UsageError where it cannot be read or is not one."""
    try:
        value = tomllib.loads(read_input(Path(path)))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}.", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is not TOML: {where_broken(error)}.", hint=_HINT) from error
    return cluster_from_toml(value, str(path))


def cluster_from_toml(value: Mapping[str, Any], source: str) -> Cluster:
    """As load_cluster, of what is parsed already."""
    tables = {name: _table(value, name, source) for name in _KEYS}
    unknown = next((name for name in value if name not in _KEYS), None)
    if unknown is not None:
        raise UsageError(f"{source!r} has an unknown table [{unknown}].", hint=_HINT)
    about = tables["cluster"]
    if about is None or not isinstance(about.get("accelerator"), str):
        raise UsageError(f"{source!r} does not say [cluster] accelerator.", hint=_HINT)
    per_node = _whole(about, "per_node", 1, source)
    cluster = make_cluster(
        load_hardware(about["accelerator"]),
        num_nodes=_whole(about, "nodes", 1, source),
        per_node=per_node,
        inside=_link(tables["inside"], "inside", source, NVLINK_LATENCY_S),
        across=_across(tables["across"], per_node, source),
    )
    host = _link(tables["host"], "host", source, PCIE_LATENCY_S)
    return cluster if host is None else dataclasses.replace(cluster, host=host)


def _table(value: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any] | None:
    table = value.get(name)
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise UsageError(f"{name} of {source!r} is no table.", hint=_HINT)
    unknown = next((key for key in table if key not in _KEYS[name]), None)
    if unknown is not None:
        raise UsageError(
            f"[{name}] of {source!r} has an unknown key {unknown!r}.",
            hint=f"known are {', '.join(_KEYS[name])}.",
        )
    return table


def _across(table: Mapping[str, Any] | None, per_node: int, source: str) -> Link | None:
    link = _link(table, "across", source, NETWORK_LATENCY_S)
    if link is None or table is None:
        return None
    rails = _whole(table, "rails", per_node, source)
    oversubscription = _number(table, "oversubscription", 1.0, source)
    card = link.bytes_per_s / oversubscription
    return dataclasses.replace(
        link,
        bytes_per_s=card * rails / per_node,
        card_bytes_per_s=card if rails < per_node else None,
    )


def _link(table: Mapping[str, Any] | None, name: str, source: str, latency_s: float) -> Link | None:
    if table is None:
        return None
    rate, kind = table.get("rate"), table.get("kind", "network" if name == "across" else "link")
    if not isinstance(rate, str) or not isinstance(kind, str):
        raise UsageError(
            f"[{name}] of {source!r} needs a rate.", hint='write it as rate = "400Gbps" or "50GB/s".'
        )
    return Link(
        kind=kind,
        bytes_per_s=parse_rate(rate),
        alpha_s=_number(table, "latency_us", latency_s * 1e6, source) / 1e6,
        source=f"as given in {source}",
    )


def _whole(table: Mapping[str, Any], key: str, default: int, source: str) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 10**7:
        raise UsageError(f"{key} of {source!r} is {value!r}.", hint="it is a whole number, at least 1.")
    return value


def _number(table: Mapping[str, Any], key: str, default: float, source: str) -> float:
    value = table.get(key, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and 0 < value < 1e9):
        raise UsageError(f"{key} of {source!r} is {value!r}.", hint="it is a positive number.")
    return float(value)
