"""AMD's accelerators; rules as in catalogue.py."""

from __future__ import annotations

from memadvisor.hardware.entry import CatalogueEntry, one_page
from memadvisor.hardware.other_cards import BEST_PRODUCTS, OF_THE_BEST

MI100 = "AMD Instinct MI100 product page, https://www.amd.com/en/products/accelerators/instinct/mi100.html"
MI250X = "AMD Instinct MI250X product page, half of its figures, https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html"
MI300X = "AMD Instinct MI300X data sheet, https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf"
MI210 = (
    "AMD Instinct MI210 product page, https://www.amd.com/en/products/accelerators/instinct/mi200/mi210.html"
)
MI250 = "AMD Instinct MI250 product page, half of its figures, https://www.amd.com/en/products/accelerators/instinct/mi200/mi250.html"
MI325X = "AMD Instinct MI325X data sheet, https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/product-briefs/instinct-mi325x-datasheet.pdf"
MI355X = "AMD Instinct MI355X data sheet, https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/product-briefs/amd-instinct-mi355x-gpu-brochure.pdf"
MI350X = (
    f"{MI355X}: its rates at 2.2 of 2.4 GHz (AMD at Hot Chips 2025, https://wccftech.com/"
    "amd-instinct-mi350-gpuai-hardware-powerhouse-3nm-3d-chiplet-cdna-4-185-billion-transistors-1400w-tbp-over-4000b-llm-support/)"
)

CDNA2_SHARE = 0.767 * OF_THE_BEST
# Where power limits products, as an H100's and CDNA 3's and 4's, a step reaches less of the best: of an H100 0.6 of the sheet's
# rate, where the best of many shapes is 0.803 (the same table; in 8 bits 0.709), and torch's of 8192 one after another 0.728 (720
# TFLOP/s by SemiAnalysis, beside 620 on an MI300X, https://newsletter.semianalysis.com/p/mi300x-vs-h100-vs-h200-benchmark-part-1-training).
LIMITED, LIMITED_NARROW, LIMITED_TORCH = 0.6 / 0.803, 0.6 / 0.709, 0.6 / 0.728
# Best products with caches flushed of an MI300X (668 TFLOP/s) and an MI325X, which has more power (785).
MI300X_SHARE, MI325X_SHARE = 668.4 / 1307.4 * LIMITED, 784.9 / 1307.4 * LIMITED
# Their best in 8 bits, 1273 and 1519 TFLOP/s, are AMD's own.
MI300X_NARROW_SHARE, MI325X_NARROW_SHARE = 1273 / 2614.9 * LIMITED_NARROW, 1519 / 2614.9 * LIMITED_NARROW
TRACELENS = "AMD's TraceLens, https://github.com/AMD-AGI/TraceLens"
# Of an MI350X, which has less power than an MI355X: 1117 TFLOP/s by torch of a product of 8192, 1040 of 16384.
MI350X_SHARE, MI350X_PRODUCTS = (
    1116.7 / 2306.9 * LIMITED_TORCH,
    "HipKittens, https://github.com/HazyResearch/HipKittens/blob/978e0c5d32fb832cbc73b05549104c982a212901/analysis/mi350x_data_to_log.json",
)
# An MI355X's best by hipBLASLt.
MI355X_SHARE, MI355X_NARROW_SHARE, MI355X_PRODUCTS = (
    1639.8 / 2516.6 * LIMITED,
    3611 / 5033.2 * LIMITED_NARROW,
    "rocmval beside a Megatron-LM sweep of 8 MI355X (summary of June 2026)",
)

CDNA3_RATES = {
    "float8_e4m3fnuz": 2614.9e12,
    "float16": 1307.4e12,
    "bfloat16": 1307.4e12,
    "tf32": 653.7e12,
    "float32": 163.4e12,
    "float64": 163.4e12,
}  # of an MI300X and an MI325X alike

AMD_CARDS: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="MI250X-die-64GB",
        aliases=("mi250x", "amd instinct mi250x", "mi250x gcd"),
        memory_bytes=64 * 10**9,
        memory_bandwidth_bytes_per_s=1.6e12,
        peak_flops_per_s={
            "float16": 191.5e12,
            "bfloat16": 191.5e12,
            "float32": 47.85e12,  # by its matrix cores, which torch's products use
            "float64": 47.85e12,
        },
        sources=one_page(MI250X) | {"matmul": BEST_PRODUCTS},
        matmul_share=CDNA2_SHARE,
    ),
    CatalogueEntry(
        name="MI250-die-64GB",
        aliases=("mi250", "amd instinct mi250"),
        memory_bytes=64 * 10**9,
        memory_bandwidth_bytes_per_s=1.6e12,
        peak_flops_per_s={
            "float16": 181.05e12,
            "bfloat16": 181.05e12,
            "float32": 45.25e12,
            "float64": 45.25e12,
        },
        sources=one_page(MI250) | {"matmul": BEST_PRODUCTS},
        matmul_share=CDNA2_SHARE,
    ),
    CatalogueEntry(
        name="MI210-64GB",
        aliases=("mi210",),
        memory_bytes=64 * 10**9,
        memory_bandwidth_bytes_per_s=1.6e12,
        peak_flops_per_s={"float16": 181e12, "bfloat16": 181e12, "float32": 45.3e12, "float64": 45.3e12},
        sources=one_page(MI210) | {"matmul": BEST_PRODUCTS},
        matmul_share=CDNA2_SHARE,
    ),
    CatalogueEntry(
        name="MI100-32GB",
        aliases=("mi100", "amd instinct mi100"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=1228.8e9,
        peak_flops_per_s={"float16": 184.6e12, "bfloat16": 92.3e12, "float32": 46.1e12, "float64": 11.5e12},
        sources=one_page(MI100),
    ),
    CatalogueEntry(
        name="MI300X-192GB",
        aliases=("mi300x", "amd instinct mi300x", "amd instinct mi300x oam"),
        memory_bytes=192 * 10**9,
        memory_bandwidth_bytes_per_s=5.3e12,
        peak_flops_per_s=CDNA3_RATES,
        sources=one_page(MI300X) | {"matmul": f"{BEST_PRODUCTS}; in 8 bits {TRACELENS}"},
        matmul_share=MI300X_SHARE,
        narrow_matmul_share=MI300X_NARROW_SHARE,
    ),
    CatalogueEntry(
        name="MI325X-256GB",
        aliases=("mi325x",),
        memory_bytes=256 * 10**9,
        memory_bandwidth_bytes_per_s=6e12,
        peak_flops_per_s=CDNA3_RATES,
        sources=one_page(MI325X) | {"matmul": f"{BEST_PRODUCTS}; in 8 bits {TRACELENS}"},
        matmul_share=MI325X_SHARE,
        narrow_matmul_share=MI325X_NARROW_SHARE,
    ),
    CatalogueEntry(
        name="MI350X-288GB",
        aliases=("mi350x",),
        memory_bytes=288 * 10**9,
        memory_bandwidth_bytes_per_s=8e12,
        peak_flops_per_s={
            "float4_e2m1fn": 9227.5e12,
            "float8_e4m3fn": 4613.8e12,
            "float16": 2306.9e12,
            "bfloat16": 2306.9e12,
            "float32": 144.2e12,
            "float64": 72.1e12,
        },
        sources=one_page(MI350X) | {"matmul": MI350X_PRODUCTS},
        matmul_share=MI350X_SHARE,
    ),
    CatalogueEntry(
        name="MI355X-288GB",
        aliases=("mi355x",),
        memory_bytes=288 * 10**9,
        memory_bandwidth_bytes_per_s=8e12,
        peak_flops_per_s={
            "float4_e2m1fn": 10066.3e12,
            "float8_e4m3fn": 5033.2e12,
            "float16": 2516.6e12,
            "bfloat16": 2516.6e12,
            "float32": 157.3e12,
            "float64": 78.6e12,
        },
        sources=one_page(MI355X) | {"matmul": MI355X_PRODUCTS},
        matmul_share=MI355X_SHARE,
        narrow_matmul_share=MI355X_NARROW_SHARE,
    ),
)
