"""Published figures of accelerators, each with the page that publishes it. Dense rates, never with sparsity.

GB means 10**9 bytes, as on the data sheets. A device that is not here is unknown: measure it with
`memadvisor calibrate`.
"""

from __future__ import annotations

from dataclasses import dataclass

V100 = "NVIDIA V100 data sheet (2020), https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
A100 = "NVIDIA A100 data sheet (2021), https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
A100_40 = "NVIDIA A100 architecture white paper (2020), table 1, https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
H100 = "NVIDIA H100 data sheet, https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet; tensor rates halved, for they are printed with sparsity"
H200 = "NVIDIA H200 data sheet, https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446; tensor rates halved, for they are printed with sparsity"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """`aliases` are the names by which drivers and people call the device, in any case.

    `sources` name the page of each figure: `memory`, `bandwidth`, `flops`.
    """

    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: dict[str, float]
    sources: dict[str, str]


def _from(page: str) -> dict[str, str]:
    return dict.fromkeys(("memory", "bandwidth", "flops"), page)


_A100_FLOPS = {"float16": 312e12, "bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 9.7e12}
_H100_FLOPS = {
    "float8_e4m3fn": 1979e12,
    "float16": 989.5e12,
    "bfloat16": 989.5e12,
    "tf32": 494.5e12,
    "float32": 67e12,
    "float64": 34e12,
}

CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="V100-SXM2-32GB",
        aliases=("v100", "v100-32", "tesla v100-sxm2-32gb"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=900e9,
        peak_flops_per_s={"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12},
        sources=_from(V100),
    ),
    CatalogueEntry(
        name="A100-SXM4-40GB",
        aliases=("a100-40", "a100 40gb", "nvidia a100-sxm4-40gb"),
        memory_bytes=40 * 10**9,
        memory_bandwidth_bytes_per_s=1555e9,
        peak_flops_per_s=_A100_FLOPS,
        sources=_from(A100_40),
    ),
    CatalogueEntry(
        name="A100-SXM4-80GB",
        aliases=("a100-80", "a100 80gb", "nvidia a100-sxm4-80gb"),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=2039e9,
        peak_flops_per_s=_A100_FLOPS,
        sources=_from(A100),
    ),
    CatalogueEntry(
        name="H100-SXM-80GB",
        aliases=("h100", "h100-80", "nvidia h100 80gb hbm3"),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=3.35e12,
        peak_flops_per_s=_H100_FLOPS,
        sources=_from(H100),
    ),
    CatalogueEntry(
        name="H200-SXM-141GB",
        aliases=("h200", "h200-141", "nvidia h200"),
        memory_bytes=141 * 10**9,
        memory_bandwidth_bytes_per_s=4.8e12,
        peak_flops_per_s=_H100_FLOPS,
        sources=_from(H200),
    ),
)


def find_entry(name: str) -> CatalogueEntry | None:
    """The entry called `name`, in any case and with blanks at its ends; None for a device not listed."""
    wanted = name.strip().lower()
    return next((e for e in CATALOGUE if wanted in (e.name.lower(), *e.aliases)), None)
