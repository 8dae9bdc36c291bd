"""What the vendors publish of the links between accelerators: one direction's bytes a second for each accelerator.

`mesh`: what joins all accelerators of a node (NVLink through switches or a cube mesh, Infinity Fabric); None for cards that
have the bus alone (bridges over two cards are left out, for they join no node). `pcie`: the bus, which is the way to the
host too unless `host` says otherwise. `reference`: the vendor's own node of such cards, whose network cards are taken where
nobody names others; network cards belong to the node, not to the card. Rates of PCIe are those of its lanes before coding
(16 GB/s for 16 lanes of generation 3).

Latencies are those by which NCCL chooses its algorithms (ring, protocol Simple): NCCL 2.12, src/graph/tuning.cc, hwLat.
Of TPUs' links and Ascend's none is published; NVLink's is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memadvisor.hardware.cluster import Link

NVLINK_LATENCY_S, PCIE_LATENCY_S, NETWORK_LATENCY_S = 3.4e-6, 5.7e-6, 9.6e-6

_SHEET = "the device's data sheet, as in the catalogue"
PCIE_SHEET = "PCI Express Base Specification: 8, 16, 32 GT/s a lane in generations 3, 4, 5; 16 lanes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceNode:
    """A vendor's node: how many accelerators, and what its network gives each of them in one direction (None: not
    published). A torus of TPUs counts as one node, for its links join them all. `card_bytes_per_s`: of one of its cards.
    """

    name: str
    per_node: int
    bytes_per_s: float | None
    source: str
    card_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinks:
    """The links of one catalogue entry, as the module describes them. `sold_in_fours`: also on boards of four that links
    join one to one, where the usual node has a switch (NVIDIA, Introducing HGX A100, 2020; HGX H100 of four)."""

    mesh: Link | None
    pcie: Link
    host: Link
    reference: ReferenceNode | None = None
    sold_in_fours: bool = False

    def mesh_of(self, num_nodes: int, per_node: int) -> Link | None:
        """As nodes of so many have it. Several nodes of four are boards of four: one of four may be a part of eight. A node
        of more than links join without a switch has one, as the DGX-2 of 16 V100 where the DGX-1 has 8."""
        if self.mesh is None or self.reference is None:
            return self.mesh
        if self.sold_in_fours and num_nodes > 1 and per_node == 4:
            return replace(self.mesh, num_peers=3)
        if self.mesh.num_peers is not None and per_node > self.reference.per_node:
            return replace(self.mesh, num_peers=None)
        return self.mesh


def _nvlink(bytes_per_s: float, source: str = _SHEET, num_peers: int | None = None) -> Link:
    return Link(
        kind="NVLink",
        bytes_per_s=bytes_per_s,
        alpha_s=NVLINK_LATENCY_S,
        source=source,
        num_peers=num_peers,
    )


# What RCCL's all-reduce moves over seven links, each to one other: 316 GB/s of the sheet's 448 among 8 MI300X and 319 among 8
# MI325X (rccl-tests, https://github.com/hisohara/ai-scripts, training/01_rccl-smoketest), 386 of 538 among 8 MI355X and 162
# of 230 among 4 of them (rccl-tests beside a Megatron-LM sweep of 8 MI355X, June 2026).
_RCCL_SHARE = 0.705


def _fabric(bytes_per_s: float, source: str, num_peers: int | None = None) -> Link:
    # NCCL's table for AMD's fabric (RCCL, tuning_model_0) has 3.6 us.
    return Link(
        kind="Infinity Fabric",
        bytes_per_s=bytes_per_s,
        alpha_s=3.6e-6,
        source=source,
        num_peers=num_peers,
        reached_share=None if num_peers is None else _RCCL_SHARE,
    )


def _ici(bytes_per_s: float, pod: ReferenceNode, sheet: str) -> Link:
    source = f"{pod.source}: {sheet}"
    return Link(kind="ICI", bytes_per_s=bytes_per_s, alpha_s=NVLINK_LATENCY_S, source=source)


def _pcie(generation: int) -> Link:
    rate = {3: 16e9, 4: 32e9, 5: 64e9}[generation]
    return Link(kind=f"PCIe {generation}.0 x16", bytes_per_s=rate, alpha_s=PCIE_LATENCY_S, source=PCIE_SHEET)


def _links(
    pcie: int,
    mesh: Link | None = None,
    reference: ReferenceNode | None = None,
    host: Link | None = None,
    *,
    fours: bool = False,
) -> DeviceLinks:
    bus = _pcie(pcie)
    host = bus if host is None else host
    return DeviceLinks(mesh=mesh, pcie=bus, host=host, reference=reference, sold_in_fours=fours)


def _node(name: str, num_cards: int, gbit_per_s: float, source: str, per_node: int = 8) -> ReferenceNode:
    card = gbit_per_s * 1e9 / 8
    return ReferenceNode(
        name=name,
        per_node=per_node,
        bytes_per_s=num_cards * card / per_node,
        source=source,
        card_bytes_per_s=card if num_cards < per_node else None,
    )


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
_ALPS = _node(
    "a node of Alps, 4 GH200 with 4 x 200 Gbit/s Slingshot",
    4,
    200,
    "CSCS, Alps hardware, https://docs.cscs.ch/alps/hardware: four modules and four network cards; JUPITER's nodes have four of 200 Gbit/s as well",
    per_node=4,
)
_DGX_GB200 = _node(
    "DGX GB200 (NVL72), 72 x 400 Gbit/s InfiniBand NDR",
    72,
    400,
    "NVIDIA DGX GB200 data sheet, https://resources.nvidia.com/en-us-dgx-systems/dgx-superpod-gb200-datasheet",
    per_node=72,
)
_DGX_B300 = _node(
    "DGX B300, 8 x 800 Gbit/s",
    8,
    800,
    "NVIDIA DGX B300 user guide, https://docs.nvidia.com/dgx/dgxb300-user-guide/introduction-to-dgxb300.html",
)
_GB300_RACK = _node(
    "GB300 NVL72, 72 x 800 Gbit/s",
    72,
    800,
    "NVIDIA GB300 NVL72, https://www.nvidia.com/en-us/data-center/gb300-nvl72/",
    per_node=72,
)
_TPU_V5E_POD = _node(
    "a pod of 256 TPU v5e, 6.4 Tbit/s for all",
    256,
    25,
    "Google Cloud TPU v5e, https://docs.cloud.google.com/tpu/docs/v5e",
    per_node=256,
)
_TPU_V6E_POD = _node(
    "a pod of 256 TPU v6e, 100 Gbit/s for each",
    256,
    100,
    "Google Cloud TPU v6e, https://docs.cloud.google.com/tpu/docs/v6e",
    per_node=256,
)
_TPU_7X_POD = _node(
    "a pod of 9216 TPU7x, 100 Gbit/s for each",
    9216,
    100,
    "Google Cloud TPU7x, https://docs.cloud.google.com/tpu/docs/tpu7x",
    per_node=9216,
)
_GAUDI3_NODE = _node(
    "Intel's node of 8 Gaudi 3, 3 x 200 Gbit/s for each",
    24,
    200,
    "Intel Gaudi network configuration, https://docs.habana.ai/en/latest/Management_and_Monitoring/Network_Configuration/index.html",
)
_TPU_V4_POD = ReferenceNode(
    name="a pod of 4096 TPU v4", per_node=4096, bytes_per_s=None, source="arXiv:2304.01433"
)
_TPU_V5P_POD = _node(
    "a slice of 6144 TPU v5p, 50 Gbit/s for each",
    6144,
    50,
    "Google Cloud TPU v5p, https://docs.cloud.google.com/tpu/docs/v5p",
    per_node=6144,
)
_FRONTIER = _node(
    "a node of Frontier, 4 x 200 Gbit/s Slingshot for 4 MI250X (8 dies)",
    4,
    200,
    "OLCF Frontier user guide, https://docs.olcf.ornl.gov/systems/frontier_user_guide.html",
)
_MI300X_NODE = _node(
    "a node of 8 MI300X or MI325X with 8 ConnectX-7, 8 x 400 Gbit/s",
    8,
    400,
    "AMD ROCm documentation, https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference/benchmark-docker/vllm-mori-distributed.html",
)
_MI355X_NODE = _node(
    "a node of 8 MI355X with 8 Pollara 400, 8 x 400 Gbit/s",
    8,
    400,
    "AMD ROCm documentation, https://rocm.docs.amd.com/en/latest/how-to/rocm-for-ai/inference/benchmark-docker/sglang-mori-distributed.html",
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
# No switch joins them: six of a superchip's eighteen links go to each of the other three.
_GH200_MESH = _nvlink(
    450e9,
    "NVIDIA GH200 data sheet: NVLink 900 GB/s both ways; four of them as in arXiv:2408.11556, section 2",
    num_peers=3,
)
# Six links of each, one or two to a neighbour (NVIDIA DGX-1 with Tesla V100 system architecture, figure 4: hybrid cube mesh): two
# ranks have one between them, and rings through more as many as the others have to each.
_V100_MESH = _nvlink(150e9, num_peers=6)
_MI250X_MESH = _fabric(200e9, "AMD MI250X product page: 8 links of 100 GB/s both ways a module, of two dies")
_MI300X_MESH = _fabric(448e9, "AMD MI300X data sheet: 7 links of 128 GB/s both ways", num_peers=7)
_MI355X_MESH = _fabric(537.6e9, "AMD MI355X data sheet: 7 links of 153.6 GB/s both ways", num_peers=7)
_TPU_V4_MESH = _ici(300e9, _TPU_V4_POD, "6 links of 50 GB/s")
_TPU_V5E_MESH = _ici(200e9, _TPU_V5E_POD, "400 GB/s both ways")
_TPU_V6E_MESH = _ici(400e9, _TPU_V6E_POD, "800 GB/s both ways")
_TPU_7X_MESH = _ici(600e9, _TPU_7X_POD, "1200 GB/s both ways")
_GAUDI3_MESH = Link(
    kind="Ethernet of Gaudi 3",
    bytes_per_s=525e9,
    alpha_s=NETWORK_LATENCY_S,
    source=f"{_GAUDI3_NODE.source}: 21 ports of 200 Gbit/s inside a node",
    num_peers=7,
)
_ASCEND_NODE = _node(
    "an Atlas 800T A2 of 8 Ascend 910B, 8 x 200 Gbit/s RoCE",
    8,
    200,
    "Huawei Atlas 800T A2 white paper, https://e.huawei.com/cn/documents/products/computing/b0b253c4d5da4e05ba80a39e3dc65fd2",
)
_ASCEND_MESH = Link(
    kind="HCCS",
    bytes_per_s=196e9,
    alpha_s=NVLINK_LATENCY_S,
    source="https://github.com/ArthurChiao/arthurchiao.github.io (GPU performance, data sheets): 7 links of 56 GB/s both ways",
    num_peers=7,
)
_GAUDI2_NODE = _node(
    "a node of 8 Gaudi 2, 3 x 100 Gbit/s for each",
    24,
    100,
    "Intel Gaudi architecture (21 of 24 ports of 100 Gbit/s inside a node), https://docs.habana.ai/en/latest/Gaudi_Overview/Gaudi_Architecture.html",
)
_GAUDI2_MESH = Link(
    kind="Ethernet of Gaudi 2",
    bytes_per_s=262.5e9,
    alpha_s=NETWORK_LATENCY_S,
    source=f"{_GAUDI2_NODE.source}: 21 ports of 100 Gbit/s inside a node",
    num_peers=7,
)
_TPU_V5P_MESH = _ici(300e9, _TPU_V5P_POD, "4800 Gbit/s both ways")

LINKS: dict[str, DeviceLinks] = {
    "V100-SXM2-16GB": _links(3, _V100_MESH, _DGX_V100),
    "V100-SXM2-32GB": _links(3, _V100_MESH, _DGX_V100),
    "V100-PCIe-16GB": _links(3),
    "V100-PCIe-32GB": _links(3),
    "V100S-PCIe-32GB": _links(3),
    "A100-SXM4-40GB": _links(4, _nvlink(300e9), _DGX_A100, fours=True),
    "A100-SXM4-80GB": _links(4, _nvlink(300e9), _DGX_A100, fours=True),
    "A100-PCIe-80GB": _links(4),
    "H100-SXM-80GB": _links(5, _nvlink(450e9), _DGX_H100, fours=True),
    "H100-PCIe-80GB": _links(5),
    "H100-NVL-94GB": _links(5),
    "H800-SXM-80GB": _links(5, _nvlink(200e9, _H800_NODE.source), _H800_NODE),
    "H200-SXM-141GB": _links(5, _nvlink(450e9), _DGX_H100, fours=True),
    "GH200-96GB": _links(5, _GH200_MESH, _ALPS, host=_C2C),
    "GH200-144GB": _links(5, _GH200_MESH, _ALPS, host=_C2C),
    "B200-180GB": _links(5, _nvlink(900e9), _DGX_B200),
    "GB200-186GB": _links(5, _nvlink(900e9), _DGX_GB200, host=_HALF_C2C),
    "A100-PCIe-40GB": _links(4),
    "A800-SXM4-80GB": _links(4, _nvlink(200e9, "NVIDIA A800: NVLink 400 GB/s both ways"), _DGX_A100),
    "H20-SXM-96GB": _links(5, _nvlink(450e9, "as the H20 in the catalogue: NVLink 900 GB/s both ways")),
    "B300-288GB": _links(5, _nvlink(900e9), _DGX_B300),
    "GB300-279GB": _links(5, _nvlink(900e9), _GB300_RACK, host=_HALF_C2C),
    "P100-SXM2-16GB": _links(3, _nvlink(80e9, num_peers=4)),
    "T4-16GB": _links(3),
    "A30-24GB": _links(4),
    "A40-48GB": _links(4),
    "L40-48GB": _links(4),
    "A10-24GB": _links(4),
    "A10G-24GB": _links(4),
    "L4-24GB": _links(4),
    "L40S-48GB": _links(4),
    "RTX-3090-24GB": _links(4),
    "RTX-A6000-48GB": _links(4),
    "RTX-2080-Ti-11GB": _links(3),
    "TITAN-RTX-24GB": _links(3),
    "RTX-6000-Ada-48GB": _links(4),
    "RTX-4090-24GB": _links(4),
    "RTX-5090-32GB": _links(5),
    "MI250X-die-64GB": _links(4, _MI250X_MESH, _FRONTIER),
    "MI250-die-64GB": _links(
        4, _fabric(150e9, "AMD MI250 product page: 6 links of 100 GB/s both ways a module, of two dies")
    ),
    "MI210-64GB": _links(
        4, _fabric(150e9, "AMD MI210 product page: 3 links of 100 GB/s both ways", num_peers=3)
    ),
    "MI100-32GB": _links(4),
    "MI300X-192GB": _links(5, _MI300X_MESH, _MI300X_NODE),
    "MI325X-256GB": _links(5, _MI300X_MESH, _MI300X_NODE),
    "MI350X-288GB": _links(5, _MI355X_MESH, _MI355X_NODE),
    "MI355X-288GB": _links(5, _MI355X_MESH, _MI355X_NODE),
    "RTX-PRO-6000-96GB": _links(5),
    "RTX-2070-8GB": _links(3),
    "RTX-2080-8GB": _links(3),
    "Quadro-RTX-6000-24GB": _links(3),
    "Quadro-RTX-8000-48GB": _links(3),
    "RTX-3060-12GB": _links(4),
    "RTX-3060-Ti-8GB": _links(4),
    "RTX-3070-8GB": _links(4),
    "RTX-3070-Ti-8GB": _links(4),
    "RTX-3080-10GB": _links(4),
    "RTX-3080-Ti-12GB": _links(4),
    "RTX-3090-Ti-24GB": _links(4),
    "RTX-4060-8GB": _links(3),  # eight lanes of the fourth generation
    "RTX-4060-Ti-8GB": _links(3),  # eight lanes of the fourth generation
    "RTX-4060-Ti-16GB": _links(3),  # eight lanes of the fourth generation
    "RTX-4070-12GB": _links(4),
    "RTX-4070-SUPER-12GB": _links(4),
    "RTX-4070-Ti-12GB": _links(4),
    "RTX-4070-Ti-SUPER-16GB": _links(4),
    "RTX-4080-16GB": _links(4),
    "RTX-4080-SUPER-16GB": _links(4),
    "RTX-5060-Ti-16GB": _links(4),  # eight lanes of the fifth generation
    "RTX-5070-12GB": _links(5),
    "RTX-5070-Ti-16GB": _links(5),
    "RTX-5080-16GB": _links(5),
    "RTX-A2000-12GB": _links(4),
    "RTX-A4000-16GB": _links(4),
    "RTX-A4500-20GB": _links(4),
    "RTX-A5000-24GB": _links(4),
    "RTX-A5500-24GB": _links(4),
    "RTX-2000-Ada-16GB": _links(3),  # eight lanes of the fourth generation
    "RTX-4000-Ada-20GB": _links(4),
    "RTX-4500-Ada-24GB": _links(4),
    "RTX-5000-Ada-32GB": _links(4),
    "Ascend-910B2-64GB": _links(4, _ASCEND_MESH, _ASCEND_NODE),
    "Ascend-910B3-64GB": _links(4, _ASCEND_MESH, _ASCEND_NODE),
    "L20-48GB": _links(4),
    "RTX-4090-D-24GB": _links(4),
    "Gaudi-2-96GB": _links(4, _GAUDI2_MESH, _GAUDI2_NODE),
    "Gaudi-3-128GB": _links(5, _GAUDI3_MESH, _GAUDI3_NODE),
    "TPU-v6e-32GB": _links(5, _TPU_V6E_MESH, _TPU_V6E_POD),
    "TPU-7x-192GB": _links(5, _TPU_7X_MESH, _TPU_7X_POD),
    "TPU-v4-32GB": _links(3, _TPU_V4_MESH, _TPU_V4_POD),
    "TPU-v5e-16GB": _links(3, _TPU_V5E_MESH, _TPU_V5E_POD),
    "TPU-v5p-95GB": _links(3, _TPU_V5P_MESH, _TPU_V5P_POD),
}
