"""GeForce cards and AMD's accelerators; rules as in catalogue.py."""

from __future__ import annotations

from memadvisor.hardware.entry import CatalogueEntry, one_page

GA102 = "NVIDIA Ampere GA102 GPU architecture white paper (v2), table of the GeForce RTX 3090, https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = "NVIDIA Ada GPU architecture white paper, table of the GeForce RTX 4090, https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper, table of the GeForce RTX 5090, https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
MI250X = "AMD Instinct MI250X product page, half of its figures, https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"
MI300X = "AMD Instinct MI300X data sheet, https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"

OTHER_CARDS: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="RTX-3090-24GB",
        aliases=("rtx3090", "rtx 3090", "nvidia geforce rtx 3090"),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=936e9,
        peak_flops_per_s={"float16": 71e12, "bfloat16": 71e12, "tf32": 35.6e12, "float32": 35.6e12},
        sources=one_page(GA102),
    ),
    CatalogueEntry(
        name="RTX-4090-24GB",
        aliases=("rtx4090", "rtx 4090", "nvidia geforce rtx 4090"),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=1008e9,
        peak_flops_per_s={
            "float8_e4m3fn": 330.3e12,
            "float16": 165.2e12,
            "bfloat16": 165.2e12,
            "tf32": 82.6e12,
            "float32": 82.6e12,
        },
        sources=one_page(ADA),
    ),
    CatalogueEntry(
        name="RTX-5090-32GB",
        aliases=("rtx5090", "rtx 5090", "nvidia geforce rtx 5090"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=1792e9,
        peak_flops_per_s={
            "float8_e4m3fn": 419e12,
            "float16": 209.5e12,
            "bfloat16": 209.5e12,
            "tf32": 104.8e12,
            "float32": 104.8e12,
        },
        sources=one_page(RTX_BLACKWELL),
    ),
    CatalogueEntry(
        name="MI250X-die-64GB",
        aliases=("mi250x", "amd instinct mi250x"),
        memory_bytes=64 * 10**9,
        memory_bandwidth_bytes_per_s=1.6e12,
        peak_flops_per_s={
            "float16": 191.5e12,
            "bfloat16": 191.5e12,
            "float32": 47.85e12,  # by its matrix cores, which torch's products use
            "float64": 47.85e12,
        },
        sources=one_page(MI250X),
    ),
    CatalogueEntry(
        name="MI300X-192GB",
        aliases=("mi300x", "amd instinct mi300x", "amd instinct mi300x oam"),
        memory_bytes=192 * 10**9,
        memory_bandwidth_bytes_per_s=5.3e12,
        peak_flops_per_s={
            "float8_e4m3fnuz": 2614.9e12,
            "float16": 1307.4e12,
            "bfloat16": 1307.4e12,
            "tf32": 653.7e12,
            "float32": 163.4e12,
            "float64": 163.4e12,
        },
        sources=one_page(MI300X),
    ),
)
