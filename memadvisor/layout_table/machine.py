"""A row's columns of hardware -> Cluster."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from functools import lru_cache

from memadvisor.errors import UnknownHardwareError, UsageError
from memadvisor.hardware.catalogue import CATALOGUE, find_entry
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.clusters import links_of, make_cluster, named_inside, network_link
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.load import named_hardware
from memadvisor.layout_table.cells import Cells

_NAMES = {alias.lower(): entry.name for entry in CATALOGUE for alias in (entry.name, *entry.aliases)}
USUAL_GPU = "A100-80GB"
_PLAIN_NETWORK_BYTES_PER_S = 25e9  # 200 Gbit/s a node, where neither the table nor the vendor says more
_LARGEST_HOST = 16  # accelerators of one machine; more are a rack or a pod
_FASTEST_CARD_BYTES_PER_S = 50e9  # a node's rate beyond it is that of several cards
_TELLING = (
    "framework",
    "interconnect",
    "source",
)  # columns that may name the accelerator beside what they are for
_SIZE = re.compile(r"[\s_-]*\b(\d+)\s*(?:gb|gib|g)\b", re.IGNORECASE)
_MIB = re.compile(r"\s*(\d+(?:\.\d+)?)\s*mi?b\s*", re.IGNORECASE)
# `100Gb` and `100GbE` are rates too; `100GB` is a size.
_RATE = re.compile(
    r"(?:(\d+)\s*[x*\u00d7]\s*)?(\d+(?:\.\d+)?)\s*([gt])(?:(b|bit|bits|B)(?:/s|ps)|(?-i:bits?|b|bE))\b",
    re.IGNORECASE,
)
# Gbit/s of one port of four lanes: InfiniBand Trade Association, roadmap.
_INFINIBAND = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}
# A GeForce card by its bare number: 3090, 2080Ti.
_GEFORCE = re.compile(
    r"^\s*(?:nvidia\s+|geforce\s+|rtx[\s-]*)*([2-5]0\d0)\s*-?(ti)?[\s-]*(super)?\s*$", re.IGNORECASE
)
# Machines that are named in place of their cards: NVIDIA's, and instances of AWS, Google Cloud and Azure (their documentation).
_MACHINES = {
    r"dgx-?[12]": "V100-32GB", r"p3\.": "V100-16GB", r"p3dn\.": "V100-32GB", r"p4d(\.|$)": "A100-40GB", r"p4de(\.|$)": "A100-80GB",
    r"p5\.": "H100", r"p5en?\.": "H200", r"g5\.": "A10G", r"g6\.": "L4", r"g6e\.": "L40S", r"a2-highgpu": "A100-40GB",
    r"a2-ultragpu": "A100-80GB", r"a3-(high|mega)gpu": "H100", r"a3-ultragpu": "H200", r"a4-highgpu": "B200", r"(standard_)?nd40rs": "V100-32GB",
    r"(standard_)?nd96asr": "A100-40GB", r"(standard_)?nd96amsr": "A100-80GB", r"(standard_)?nd96isr_h100": "H100",
    r"(standard_)?nd96isr_h200": "H200", r"(standard_)?nd96isr_mi300x": "MI300X",
    r"atlas[ -]?[89]00t?[ -]?a2": "Ascend 910B",
}  # fmt: skip
_GENERATION = re.compile(r"(?:(\d+)\s*[x*\u00d7]\s*|\b)(fdr|edr|hdr|ndr|xdr)(\d{3})?\b", re.IGNORECASE)


def cluster_of(cells: Cells, num_accelerators: int) -> Cluster:
    """The machine of a row. Raises UsageError or UnknownHardwareError where it makes no sense or is not known."""
    accelerator = _as_set(_accelerator(cells), cells)
    nodes, per_node = cells.whole("nodes"), cells.whole("gpus_per_node")
    if per_node is None and nodes is not None:
        if num_accelerators % nodes:
            raise UsageError(f"{num_accelerators} accelerators do not fill {nodes} nodes alike.")
        per_node = num_accelerators // nodes
    if per_node is None:
        per_node = _usual_per_node(accelerator, num_accelerators)
    per_node = min(per_node, num_accelerators)
    if nodes is not None and nodes != -(-num_accelerators // per_node):
        raise UsageError(f"{nodes} nodes of {per_node} are not {num_accelerators} accelerators.")
    joined = _joined(accelerator, num_accelerators, per_node, cells.text("gpu") or "")
    if joined != per_node:
        cells.note(
            f"nodes of {per_node} {accelerator.name} are taken as parts of a rack or pod whose links join {joined}"
        )
    elif num_accelerators % per_node:
        joined = _largest_divisor(num_accelerators, per_node)
        cells.note(
            f"{num_accelerators} accelerators do not fill nodes of {per_node}: {joined} of each are taken"
        )
    cluster = _cluster(
        accelerator.name,
        num_accelerators // joined,
        joined,
        min(per_node, joined),
        cells.text("interconnect"),
    )
    return (
        cluster
        if cluster.accelerator == accelerator
        else dataclasses.replace(cluster, accelerator=accelerator)
    )


def _accelerator(cells: Cells) -> Hardware:
    name = cells.text("gpu")
    if name is None:
        told = [cells.text(column) or "" for column in _TELLING]
        named = next((each for text in told if (each := device_named_in(text) or _machine_in(text))), None)
        name = named or USUAL_GPU
        cells.note(f"no gpu: {name} is taken" + (", which another column names" if named else ""))
    name = re.sub(
        r"^\s*\d+\s*[x*\u00d7]\s*(?=[a-z])|(?<!rt)\s*[x*\u00d7]\s*\d{1,3}\s*$", "", name, flags=re.IGNORECASE
    )
    if (geforce := _GEFORCE.match(name)) is not None:
        name = " ".join(("rtx", *filter(None, geforce.groups())))
    name = re.sub(
        r"^\s*v([2-7][ep]?)\s*$", r"TPU v\1", name, flags=re.IGNORECASE
    )  # `v5p` of a column of chips
    name = _machine_in(name) or name
    if re.search(r"\ds$", name) and named_hardware(name) is None:
        name = name[:-1]  # `64 H100s`
    found = _of_size(name, cells) or named_hardware(name)
    if found is not None:
        return found
    # A size that the catalogue has not (A100 of 64 GB): the device is known, and its memory is what the row says.
    size = _SIZE.search(name)
    plain = named_hardware(_SIZE.sub("", name))
    if plain is None and (inside := device_named_in(name)) is not None:  # `AMD MI250X (1 GCD)`, `A100 custom`
        cells.note(f"{name} is taken for {inside}")
        plain = named_hardware(inside)
    if plain is None:
        near = difflib.get_close_matches(name.lower(), _NAMES, n=3, cutoff=0.5)
        known = dict.fromkeys(_NAMES[each] for each in near or ("v100", "a100", "h100", "mi300x"))
        raise UnknownHardwareError(
            f"{name!r} is no accelerator of the catalogue.",
            hint=f"known are {', '.join(known)} and others (memadvisor/hardware/).",
        )
    if size is None or plain.memory_bytes == int(size.group(1)) * 10**9:
        return plain
    cells.note(f"{name} is taken for {plain.name} with {size.group(1)} GB")
    return dataclasses.replace(plain, memory_bytes=int(size.group(1)) * 10**9)


def _machine_in(text: str) -> str | None:
    """The accelerator of the machine that words begin with, `p4d.24xlarge x 8`."""
    name = text.lower().removeprefix("ml.")  # SageMaker's
    return next((card for names, card in _MACHINES.items() if re.match(names, name)), None)


def _of_size(name: str, cells: Cells) -> Hardware | None:
    """The device with the memory of its own column: the one sold with about so much, for tools report less than the name says
    (39.4 GiB of 40 GB) or count otherwise (85.5 GB of 80); where none is, and the name says no size, the device with that."""
    if cells.text("gpu_mem_gb") is None:
        return None
    in_mib = _MIB.fullmatch(cells.text("gpu_mem_gb") or "")
    size = float(in_mib[1]) if in_mib is not None else cells.number("gpu_mem_gb")
    if size is None:
        return None
    size /= 1e9 if size > 1e8 else 1024 if in_mib is not None or size > 2000 else 1  # bytes, MiB
    bare = _SIZE.sub("", name)
    near = range(math.ceil(size * 0.92), math.floor(size * 1.08) + 1)
    sizes = [size, *sorted(near, key=lambda each: abs(each - size))]
    sized = next((card for each in sizes if (card := named_hardware(f"{bare} {each:g}GB"))), None)
    plain = named_hardware(bare)
    if sized is not None or plain is None or _SIZE.search(name) is not None:
        return sized
    if (
        abs(size * 1e9 / (plain.memory_bytes or math.inf) - 1) <= 0.08 or "-die-" in plain.name
    ):  # of two dies the card's
        return plain
    cells.note(f"{name} is taken for {plain.name} with {size:g} GB")
    return dataclasses.replace(plain, memory_bytes=int(size * 1e9))


def _as_set(accelerator: Hardware, cells: Cells) -> Hardware:
    """The card with the memory's bandwidth and under the power that the row gives. What limits its clock is about the cube of
    it (frequency times the square of a voltage that goes with it), so that rates go with the cube root. Raises UsageError.
    """
    bandwidth, power_w = cells.number("gpu_bandwidth_gb_s"), cells.number("gpu_power_w")
    if bandwidth is not None:
        accelerator = dataclasses.replace(accelerator, memory_bandwidth_bytes_per_s=bandwidth * 1e9)
    if power_w is None:
        return accelerator
    entry = find_entry(accelerator.name)
    if entry is None or entry.power_w is None:
        raise UsageError(
            f"gpu_power_w is {power_w:g}, and what {accelerator.name} takes as sold is not known."
        )
    slower = min(1.0, (power_w / entry.power_w) ** (1 / 3))
    rates = {dtype: rate * slower for dtype, rate in accelerator.peak_flops_per_s.items()}
    return dataclasses.replace(accelerator, peak_flops_per_s=rates)


@lru_cache(maxsize=512)
def device_named_in(text: str) -> str | None:
    """The accelerator that words name, `measured, A100-80GB, 8/node` for one; the longest name counts. None without any."""
    words = re.findall(r"[A-Za-z0-9-]+", text)
    for length in (3, 2, 1):
        for start in range(len(words) - length + 1):
            found = named_hardware(" ".join(words[start : start + length]))
            if found is not None:
                return found.name
    return None


def usual_per_node(cells: Cells) -> int:
    """Of a full node of the row's accelerator."""
    links = links_of(_accelerator(Cells(cells.texts)))
    return 8 if links is None or links.reference is None else links.reference.per_node


def _usual_per_node(accelerator: Hardware, num_accelerators: int) -> int:
    links = links_of(accelerator)
    usual = 8 if links is None or links.reference is None else links.reference.per_node
    if num_accelerators <= usual:
        return num_accelerators
    return _largest_divisor(num_accelerators, usual)


def _joined(accelerator: Hardware, num_accelerators: int, per_node: int, name: str) -> int:
    """How many accelerators the links inside a node join: more than a host's where hosts are parts of a rack (NVL72, four to a
    tray) or of a pod of TPUs.
    """
    links = links_of(accelerator)
    is_rack = links is not None and links.reference is not None and links.reference.per_node > _LARGEST_HOST
    if not is_rack or per_node > _LARGEST_HOST or re.search(r"nvl-?[248]\b", name, re.IGNORECASE):
        return per_node
    return max(per_node, _usual_per_node(accelerator, num_accelerators))


def _largest_divisor(number: int, most: int) -> int:
    return next(size for size in range(most, 0, -1) if number % size == 0)


@lru_cache(maxsize=512)
def _cluster(name: str, num_nodes: int, per_node: int, per_host: int, interconnect: str | None) -> Cluster:
    accelerator = named_hardware(name)
    assert accelerator is not None
    links = links_of(accelerator)
    reference = None if links is None or links.reference is None else links.reference.bytes_per_s
    across = None
    rates = None if interconnect is None else network_rate(interconnect, per_host, reference)
    if rates is not None:
        across = network_link(rates[0], f"the table: {interconnect}", rates[1])
    elif num_nodes > 1 and reference is None:
        plain = _PLAIN_NETWORK_BYTES_PER_S
        across = network_link(plain / per_host, "not given: 200 Gbit/s a node", plain)
    return make_cluster(
        accelerator,
        num_nodes=num_nodes,
        per_node=per_node,
        inside=_inside(accelerator, interconnect or ""),
        across=across,
    )


def _inside(accelerator: Hardware, text: str) -> Link | None:
    """PCIe where the words name it and no mesh; else what the device has."""
    words = text.lower()
    if "pcie" in words and not any(mesh in words for mesh in ("nvlink", "nvswitch", "xgmi", "sxm")):
        return named_inside(accelerator, "pcie")
    return None


def network_rate(text: str, per_node: int, reference: float | None) -> tuple[float, float | None] | None:
    """What the words give each accelerator between nodes, in bytes a second, and what a card has that several share; None
    where they name no rate.

    `4xHDR` and `8x400 Gb/s` are cards of a node; a rate `per gpu` is each accelerator's; a bare rate is the node's, of one
    card up to 400 Gb/s, unless it is the one that the vendor's own node gives each accelerator.
    """
    words = re.split(r"[;,+&]|\band\b", re.sub(r"\b(\d+)\s*G\b(?!\s*B)", r"\1 Gb/s", text))
    for part in sorted(words, key=lambda each: "nvlink" in each.lower() or "pcie" in each.lower()):
        if re.search(r"nvlink|nvswitch|pcie|xgmi", part, re.IGNORECASE):
            continue
        rates = list(_RATE.finditer(part))
        if rates:
            # `4xHDR IB 800 Gb/s per node`: the total stands behind its parts.
            return _stated(rates[-1], part, per_node, reference)
        generation = _GENERATION.search(part)
        if generation is not None:
            port = float(generation.group(3) or _INFINIBAND[generation.group(2).lower()]) * 1e9 / 8
            ports = float(generation.group(1) or per_node)
            return port * ports / per_node, port
    return None


def _stated(
    match: re.Match[str], part: str, per_node: int, reference: float | None
) -> tuple[float, float | None]:
    count, number, scale, unit = match.groups()
    rate = float(number) * (1e9 if scale.lower() == "g" else 1e12) / (1 if unit == "B" else 8)
    if count is not None:
        return rate * int(count) / per_node, rate
    if re.search(r"(per|/|each|a)[\s-]*(gpu|accelerator|card|rank|device)", part, re.IGNORECASE):
        return rate, None
    if "node" not in part.lower() and reference is not None and abs(rate / reference - 1) < 0.05:
        return rate, None
    return rate / per_node, rate if rate <= _FASTEST_CARD_BYTES_PER_S else None
