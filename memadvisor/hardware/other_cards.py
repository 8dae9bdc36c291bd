"""GeForce and RTX cards, Google's TPUs and others; rules as in catalogue.py."""

from __future__ import annotations

from memadvisor.hardware.desktop_cards import A6000_SHARE, RTX_PRO_6000_SHARE, TORCH_PRODUCTS
from memadvisor.hardware.entry import CatalogueEntry, one_page

GA102 = "NVIDIA Ampere GA102 GPU architecture white paper (v2), table of the GeForce RTX 3090, https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = "NVIDIA Ada GPU architecture white paper, table of the GeForce RTX 4090, https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture white paper, table of the GeForce RTX 5090, https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
RTX_A6000 = "NVIDIA Ampere GA102 GPU architecture white paper (v2), table of the RTX A6000, https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
RTX_6000_ADA = "NVIDIA Ada GPU architecture white paper, table of the RTX 6000 Ada, https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
TURING = "NVIDIA Turing GPU architecture white paper, table of the GeForce RTX 2080 Ti, https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/NVIDIA-Turing-Architecture-Whitepaper.pdf"
TITAN_RTX = "NVIDIA TITAN RTX product page, https://www.nvidia.com/en-us/deep-learning-ai/products/titan-rtx/; its chip at that clock as the Quadro RTX 6000 of the Turing white paper, "
TITAN_RTX += TURING.rpartition(", ")[2]
TPU_V4 = "Jouppi et al., TPU v4 (arXiv:2304.01433), table 4"
TPU_V5E = "Google Cloud TPU v5e, https://docs.cloud.google.com/tpu/docs/v5e"
TPU_V5P = "Google Cloud TPU v5p, https://docs.cloud.google.com/tpu/docs/v5p"
TPU_V6E = "Google Cloud TPU v6e, https://docs.cloud.google.com/tpu/docs/v6e"
TPU_7X = "Google Cloud TPU7x (Ironwood), https://docs.cloud.google.com/tpu/docs/tpu7x"
GAUDI2_FP8 = "Intel Gaudi 3 AI accelerator white paper (table of Gaudi 2 and Gaudi 3), https://www.intel.com/content/www/us/en/content-details/817486/intel-gaudi-3-ai-accelerator-white-paper.html"
GAUDI = "Intel at Hot Chips 2024, Gaudi 3 AI accelerator (table of Gaudi, Gaudi 2 and Gaudi 3), https://www.sgpjbg.com/baogao/465025.html"
RTX_PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell, tensor rates without sparsity as printed by https://hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris; memory, https://gpu.name/posts/nvidia-unveils-rtx-pro-6000-blackwell-gpu-with-24-064-cores-and-96gb-memory"
L20 = "figures as reported of NVIDIA's partner sheet (2023), https://github.com/ArthurChiao/arthurchiao.github.io (GPU performance, data sheets); NVIDIA publishes no sheet"
ASCEND = "Huawei's Atlas 800 and 900 A2 in two kinds, of 313 and 376 TFLOP/s, as its modelling tool names them (ATLAS_800_A2_313T_64G, ATLAS_800_A2_376T_64G); bandwidth as its users print it"

# Sheets of GeForce cards have the rate at a boost clock that they pass under load: Megatron's 117 TFLOP/s on each of 8
# RTX 4090, of which products, attention and the pipeline's bubble leave them nine tenths of the sheet's rate.
GEFORCE_SHARE, GEFORCE_PRODUCTS = (
    0.9,
    "Infinigence, training on RTX 4090, https://aurora-wandb.infini-ai.com/infini-perf/4090-48GB-megatron_r0.10.0-llama2_7b",
)
# What a step's large products reach of the best that a single one of many shapes does, as an A100's: 0.81 of the sheet's
# rate (the cost model's `matmul_share`) where the best is 0.869 of it. Cards whose sheet says nothing of the best have
# none of their own.
OF_THE_BEST = 0.93
BEST_PRODUCTS = "maximum achievable matmul FLOPS, https://github.com/stas00/ml-engineering/tree/master/compute/accelerator#maximum-achievable-matmul-flops-comparison-table"
GAUDI2_SHARE, GAUDI3_SHARE = 0.994 * OF_THE_BEST, 1288.8 / 1835 * OF_THE_BEST
# v4's and v5p's matrix units are v5e's (128 x 128, https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm).
TPU_SHARE, TPU_PRODUCTS = (
    0.923 * OF_THE_BEST,
    "JAX documentation, products of 8192 on a v5e by XLA, https://docs.jax.dev/en/latest/pallas/tpu/matmul.html",
)
ASCEND_SHARE, ASCEND_PRODUCTS = (
    328 / 376 * OF_THE_BEST,
    "products of bf16 by torch on a 910B, https://github.com/gameofdimension/limulidae",
)
TPU_V6E_SHARE, TPU_V6E_PRODUCTS = (
    0.793 * OF_THE_BEST,
    "products of 8192 and more by XLA, https://github.com/yangwhale/gpu-tpu-pedia/tree/main/tpu/v7_perf",
)
TPU_7X_SHARE, TPU_7X_PRODUCTS = (
    956.4 / 1153.5 * OF_THE_BEST,
    "Google's microbenchmarks, products of 32768 on one of a chip's two devices, https://github.com/AI-Hypercomputer/accelerator-microbenchmarks/blob/main/Ironwood/Ironwood_Microbenchmarks_readme.md",
)

OTHER_CARDS: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="RTX-3090-24GB",
        aliases=("rtx3090", "rtx 3090", "nvidia geforce rtx 3090"),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=936e9,
        peak_flops_per_s={"float16": 71e12, "bfloat16": 71e12, "tf32": 35.6e12, "float32": 35.6e12},
        power_w=350,
        sources=one_page(GA102) | {"matmul": GEFORCE_PRODUCTS},
        matmul_share=GEFORCE_SHARE,
    ),
    CatalogueEntry(
        name="RTX-A6000-48GB",
        aliases=("rtx a6000", "a6000"),
        memory_bytes=48 * 10**9,
        memory_bandwidth_bytes_per_s=768e9,
        peak_flops_per_s={"float16": 154.8e12, "bfloat16": 154.8e12, "tf32": 77.4e12, "float32": 38.7e12},
        power_w=300,
        sources=one_page(RTX_A6000) | {"matmul": TORCH_PRODUCTS},
        matmul_share=A6000_SHARE,
    ),
    CatalogueEntry(
        name="RTX-2080-Ti-11GB",
        aliases=("rtx 2080 ti",),
        memory_bytes=11 * 10**9,
        memory_bandwidth_bytes_per_s=616e9,
        peak_flops_per_s={"float16": 53.8e12, "float32": 13.4e12},
        sources=one_page(TURING),
    ),
    CatalogueEntry(
        name="TITAN-RTX-24GB",
        aliases=("titan rtx",),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=672e9,
        peak_flops_per_s={"float16": 130.5e12, "float32": 16.3e12},
        sources=one_page(TITAN_RTX),
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
        power_w=450,
        sources=one_page(ADA) | {"matmul": GEFORCE_PRODUCTS},
        matmul_share=GEFORCE_SHARE,
    ),
    CatalogueEntry(
        name="RTX-6000-Ada-48GB",
        aliases=("rtx 6000 ada", "rtx 6000 ada generation"),
        memory_bytes=48 * 10**9,
        memory_bandwidth_bytes_per_s=960e9,
        peak_flops_per_s={
            "float8_e4m3fn": 728.5e12,
            "float16": 364.2e12,
            "bfloat16": 364.2e12,
            "tf32": 182.1e12,
            "float32": 91.1e12,
        },
        sources=one_page(RTX_6000_ADA),
    ),
    CatalogueEntry(
        name="RTX-5090-32GB",
        aliases=("rtx5090", "rtx 5090", "nvidia geforce rtx 5090"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=1792e9,
        peak_flops_per_s={
            "float4_e2m1fn": 1676e12,
            "float8_e4m3fn": 419e12,
            "float16": 209.5e12,
            "bfloat16": 209.5e12,
            "tf32": 104.8e12,
            "float32": 104.8e12,
        },
        sources=one_page(RTX_BLACKWELL) | {"matmul": GEFORCE_PRODUCTS},
        matmul_share=GEFORCE_SHARE,
    ),
    CatalogueEntry(
        name="RTX-PRO-6000-96GB",
        aliases=(
            "rtx pro 6000",
            "rtx pro 6000 blackwell",
            "rtx pro 6000 blackwell workstation edition",
            "rtx pro 6000 blackwell server edition",
        ),
        memory_bytes=96 * 10**9,
        memory_bandwidth_bytes_per_s=1792e9,
        peak_flops_per_s={
            "float4_e2m1fn": 2015e12,
            "float8_e4m3fn": 1007.6e12,
            "float16": 503.8e12,
            "bfloat16": 503.8e12,
            "tf32": 251.9e12,
            "float32": 125.95e12,
        },
        power_w=600,
        sources=one_page(RTX_PRO_6000) | {"matmul": TORCH_PRODUCTS},
        matmul_share=RTX_PRO_6000_SHARE,
    ),
    CatalogueEntry(
        name="TPU-v4-32GB",
        aliases=("tpu v4", "tpuv4"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=1200e9,
        peak_flops_per_s={"bfloat16": 275e12},
        sources=one_page(TPU_V4) | {"matmul": TPU_PRODUCTS},
        matmul_share=TPU_SHARE,
    ),
    CatalogueEntry(
        name="TPU-v5e-16GB",
        aliases=("tpu v5e", "tpuv5e", "tpu v5 lite"),
        memory_bytes=16 * 10**9,
        memory_bandwidth_bytes_per_s=819e9,
        peak_flops_per_s={"bfloat16": 197e12},
        sources=one_page(TPU_V5E) | {"matmul": TPU_PRODUCTS},
        matmul_share=TPU_SHARE,
    ),
    CatalogueEntry(
        name="TPU-v5p-95GB",
        aliases=(
            "tpu v5p",
            "tpuv5p",
        ),
        memory_bytes=95 * 10**9,
        memory_bandwidth_bytes_per_s=2765e9,
        peak_flops_per_s={"float8_e4m3fn": 459e12, "bfloat16": 459e12},
        sources=one_page(TPU_V5P) | {"matmul": TPU_PRODUCTS},
        matmul_share=TPU_SHARE,
    ),
    CatalogueEntry(
        name="TPU-v6e-32GB",
        aliases=("tpu v6e", "tpuv6e", "trillium", "tpu trillium", "tpu v6e trillium"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=1638e9,
        peak_flops_per_s={"float8_e4m3fn": 918e12, "bfloat16": 918e12},
        sources=one_page(TPU_V6E) | {"matmul": TPU_V6E_PRODUCTS},
        matmul_share=TPU_V6E_SHARE,
    ),
    CatalogueEntry(
        name="TPU-7x-192GB",
        aliases=("tpu7x", "tpu 7x", "tpu v7x", "tpu v7", "ironwood", "tpu ironwood", "tpu7x ironwood"),
        memory_bytes=192 * 10**9,
        memory_bandwidth_bytes_per_s=7380e9,
        peak_flops_per_s={"float8_e4m3fn": 4614e12, "bfloat16": 2307e12},
        sources=one_page(TPU_7X) | {"matmul": TPU_7X_PRODUCTS},
        matmul_share=TPU_7X_SHARE,
    ),
    CatalogueEntry(
        name="Ascend-910B2-64GB",
        aliases=("ascend 910b2", "910b2"),
        memory_bytes=64 * 10**9,
        memory_bandwidth_bytes_per_s=1.6e12,
        peak_flops_per_s={"float16": 376e12, "bfloat16": 376e12, "float32": 94e12},
        sources=one_page(ASCEND) | {"matmul": ASCEND_PRODUCTS},
        matmul_share=ASCEND_SHARE,
    ),
    CatalogueEntry(
        name="Ascend-910B3-64GB",
        aliases=("ascend 910b3", "910b3", "ascend 910b", "910b"),  # of a bare 910B pages print 320 TFLOP/s
        memory_bytes=64 * 10**9,
        memory_bandwidth_bytes_per_s=1.6e12,
        peak_flops_per_s={"float16": 313e12, "bfloat16": 313e12, "float32": 78e12},
        sources=one_page(ASCEND) | {"matmul": ASCEND_PRODUCTS},
        matmul_share=ASCEND_SHARE,
    ),
    CatalogueEntry(
        name="L20-48GB",
        aliases=("l20", "nvidia l20"),
        memory_bytes=48 * 10**9,
        memory_bandwidth_bytes_per_s=864e9,
        peak_flops_per_s={
            "float8_e4m3fn": 239e12,
            "float16": 119.5e12,
            "bfloat16": 119.5e12,
            "tf32": 59.8e12,
            "float32": 59.8e12,
        },
        power_w=275,
        sources=one_page(L20),
    ),
    CatalogueEntry(
        name="Gaudi-2-96GB",
        aliases=("gaudi2", "gaudi 2", "gaudi2 hpu", "hl-225", "hl-225b"),
        memory_bytes=96 * 10**9,
        memory_bandwidth_bytes_per_s=2.46e12,
        peak_flops_per_s={"float8_e4m3fn": 865e12, "bfloat16": 432e12},
        power_w=600,
        sources=one_page(GAUDI) | {"flops": GAUDI2_FP8} | {"matmul": BEST_PRODUCTS},
        matmul_share=GAUDI2_SHARE,
    ),
    CatalogueEntry(
        name="Gaudi-3-128GB",
        aliases=("gaudi3", "gaudi 3", "gaudi3 hpu", "hl-325", "hl-325l"),
        memory_bytes=128 * 10**9,
        memory_bandwidth_bytes_per_s=3.67e12,
        peak_flops_per_s={"float8_e4m3fn": 1835e12, "bfloat16": 1835e12},
        power_w=900,
        sources=one_page(GAUDI) | {"matmul": BEST_PRODUCTS},
        matmul_share=GAUDI3_SHARE,
    ),
)
