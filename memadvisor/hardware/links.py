"""What the vendors publish of the links between accelerators: one direction's bytes a second for each accelerator.

`mesh`: what joins all accelerators of a node (NVLink through switches or a cube mesh, Infinity Fabric); None for cards that
have the bus alone (bridges over two cards are left out, for they join no node). `pcie`: the bus, which is the way to the
host too unless `host` says otherwise. `reference`: the vendor's own node of such cards, whose network cards are taken where
nobody names others; network cards belong to the node, not to the card. Rates of PCIe are those of its lanes before coding
(16 GB/s for 16 lanes of generation 3).

Latencies are those by which NCCL chooses its algorithms (ring, protocol Simple): NCCL 2.18, src/graph/tuning.cc, hwLat.
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.hardware.cluster import Link

NVLINK_LATENCY_S, PCIE_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 5.7e-6, 9.6e-6

_SHEET = "the device's data sheet, as in the catalogue"
_PCIE = "PCI Express Base Specification: 8, 16, 32 GT/s a lane in generations 3, 4, 5; 16 lanes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceNode:
    """A vendor's node: how many accelerators, and what its network gives each of them in one direction."""

    name: str
    per_node: int
    bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinks:
    """The links of one catalogue entry, as the module describes them."""

    mesh: Link | None
    pcie: Link
    host: Link
    reference: ReferenceNode | None = None


def _nvlink(bytes_per_s: float, source: str = _SHEET) -> Link:
    return Link(kind="NVLink", bytes_per_s=bytes_per_s, alpha_s=NVLINK_LATENCY_S, source=source)


def _fabric(bytes_per_s: float, source: str) -> Link:
    # NCCL's table for AMD's fabric (RCCL, tuning_model_0) has 3.6 us.
    return Link(kind="Infinity Fabric", bytes_per_s=bytes_per_s, alpha_s=3.6e-6, source=source)


def _pcie(generation: int) -> Link:
    rate = {3: 16e9, 4: 32e9, 5: 64e9}[generation]
    return Link(kind=f"PCIe {generation}.0 x16", bytes_per_s=rate, alpha_s=PCIE_LATENCY_S, source=_PCIE)


def _links(
    pcie: int, mesh: Link | None = None, reference: ReferenceNode | None = None, host: Link | None = None
) -> DeviceLinks:
    bus = _pcie(pcie)
    return DeviceLinks(mesh=mesh, pcie=bus, host=bus if host is None else host, reference=reference)


def _node(name: str, num_cards: int, gbit_per_s: float, source: str, per_node: int = 8) -> ReferenceNode:
    rate = num_cards * gbit_per_s * 1e9 / 8 / per_node
    return ReferenceNode(name=name, per_node=per_node, bytes_per_s=rate, source=source)


_DGX_V100 = _node(
    "DGX-1 V100, 4 x 100 Gbit/s InfiniBand EDR",
    4,
    100,
    "NVIDIA DGX-1 data sheet, https://www.nvidia.com/en-us/data-center/dgx-1/",
)
_DGX_A100 = _node(
    "DGX A100, 8 x 200 Gbit/s InfiniBand HDR",
    8,
    200,
    "NVIDIA DGX A100 data sheet, https://www.nvidia.com/en-us/data-center/dgx-a100/",
)
_DGX_H100 = _node(
    "DGX H100, 8 x 400 Gbit/s InfiniBand NDR",
    8,
    400,
    "NVIDIA DGX H100/H200 user guide, https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html",
)
_H800_NODE = _node(
    "DeepSeek-V3's node of 8 H800, 8 x 400 Gbit/s InfiniBand NDR",
    8,
    400,
    "DeepSeek-AI, Insights into DeepSeek-V3 (arXiv:2505.09343), section 4.1; NVIDIA publishes no sheet of the H800",
)
_DGX_B200 = _node(
    "DGX B200, 8 x 400 Gbit/s InfiniBand NDR",
    8,
    400,
    "NVIDIA DGX B200 data sheet, https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet",
)
_DGX_GB200 = _node(
    "DGX GB200 (NVL72), 72 x 400 Gbit/s InfiniBand NDR",
    72,
    400,
    "NVIDIA DGX GB200 data sheet, https://resources.nvidia.com/en-us-dgx-systems/dgx-superpod-gb200-datasheet",
    per_node=72,
)
_FRONTIER = _node(
    "a node of Frontier, 4 x 200 Gbit/s Slingshot for 4 MI250X (8 dies)",
    4,
    200,
    "OLCF Frontier user guide, https://docs.olcf.ornl.gov/systems/frontier_user_guide.html",
)
_MI300X_NODE = _node(
    "AMD's cluster reference architecture, 8 x 400 Gbit/s for 8 MI300X",
    8,
    400,
    "AMD Instinct MI300X cluster reference architecture guide, https://www.amd.com/en/products/accelerators/instinct/mi300.html",
)
_C2C = Link(
    kind="NVLink-C2C",
    bytes_per_s=450e9,
    alpha_s=NVLINK_LATENCY_S,
    source=_SHEET,
)
_HALF_C2C = Link(
    kind="NVLink-C2C, shared by two GPUs",
    bytes_per_s=225e9,
    alpha_s=NVLINK_LATENCY_S,
    source="NVIDIA GB200 NVL72, https://www.nvidia.com/en-us/data-center/gb200-nvl72/: 900 GB/s both ways for two GPUs",
)
_MI250X_MESH = _fabric(200e9, "AMD MI250X product page: 8 links of 100 GB/s both ways a module, of two dies")
_MI300X_MESH = _fabric(448e9, "AMD MI300X data sheet: 7 links of 128 GB/s both ways")

LINKS: dict[str, DeviceLinks] = {
    "V100-SXM2-16GB": _links(3, _nvlink(150e9), _DGX_V100),
    "V100-SXM2-32GB": _links(3, _nvlink(150e9), _DGX_V100),
    "V100-PCIe-16GB": _links(3),
    "V100-PCIe-32GB": _links(3),
    "A100-SXM4-40GB": _links(4, _nvlink(300e9), _DGX_A100),
    "A100-SXM4-80GB": _links(4, _nvlink(300e9), _DGX_A100),
    "A100-PCIe-80GB": _links(4),
    "H100-SXM-80GB": _links(5, _nvlink(450e9), _DGX_H100),
    "H100-PCIe-80GB": _links(5),
    "H100-NVL-94GB": _links(5),
    "H800-SXM-80GB": _links(5, _nvlink(200e9, _H800_NODE.source), _H800_NODE),
    "H200-SXM-141GB": _links(5, _nvlink(450e9), _DGX_H100),
    "GH200-96GB": _links(5, host=_C2C),
    "GH200-144GB": _links(5, host=_C2C),
    "B200-180GB": _links(5, _nvlink(900e9), _DGX_B200),
    "GB200-186GB": _links(5, _nvlink(900e9), _DGX_GB200, host=_HALF_C2C),
    "A10-24GB": _links(4),
    "L4-24GB": _links(4),
    "L40S-48GB": _links(4),
    "RTX-3090-24GB": _links(4),
    "RTX-4090-24GB": _links(4),
    "RTX-5090-32GB": _links(5),
    "MI250X-die-64GB": _links(4, _MI250X_MESH, _FRONTIER),
    "MI300X-192GB": _links(5, _MI300X_MESH, _MI300X_NODE),
}
