"""NVIDIA's data center cards; rules as in catalogue.py."""

from __future__ import annotations

from memadvisor.hardware.desktop_cards import A40_SHARE, H20_SHARE, L4_SHARE, T4_SHARE, TORCH_PRODUCTS
from memadvisor.hardware.entry import CatalogueEntry, one_page

_HALVED = "tensor rates halved, for they are printed with sparsity"
V100 = "NVIDIA V100 data sheet (2020), https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
A100 = "NVIDIA A100 data sheet (2021), https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
A100_PCIE_40 = "NVIDIA A100 40GB PCIe product brief PB-10137-001 (2020), and the A100 architecture white paper for the rates"
A800 = "NVIDIA A800 data sheet: an A100 of slower NVLink, https://www.nvidia.com/en-us/design-visualization/a800/ for the PCIe card; NVIDIA publishes no sheet of the SXM module"
A100_40 = "NVIDIA A100 architecture white paper (2020), table 1, https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
H100 = f"NVIDIA H100 data sheet, https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet; {_HALVED}"
H100_PCIE = f"NVIDIA H100 data sheet, edition of 2022 (with the PCIe card), https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet; {_HALVED}"
H800 = "DeepSeek-AI, Insights into DeepSeek-V3 (arXiv:2505.09343), section 2: an H100 SXM of slower NVLink and float64; NVIDIA publishes no sheet"
H20 = "figures as reported of NVIDIA's partner sheet (2023), https://willitrunai.com/gpus/h20-96gb; NVIDIA publishes no sheet"
H200 = f"NVIDIA H200 data sheet, https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446; {_HALVED}"
GH200 = f"NVIDIA GH200 Grace Hopper Superchip data sheet, https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip; {_HALVED}"
HGX_B200 = f"NVIDIA HGX platform, HGX B200, an eighth of the figures of 8 GPUs, https://www.nvidia.com/en-us/data-center/hgx/; {_HALVED}"
DGX_B200 = "NVIDIA DGX B200 data sheet, an eighth of the figures of 8 GPUs, https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet"
HGX_B300 = f"NVIDIA HGX platform, HGX B300, an eighth of the figures of 8 GPUs, https://www.nvidia.com/en-us/data-center/hgx/; {_HALVED}"
DGX_B300 = (
    "NVIDIA DGX B300 user guide, https://docs.nvidia.com/dgx/dgxb300-user-guide/introduction-to-dgxb300.html"
)
GB300 = f"NVIDIA GB300 NVL72, a seventy-second of the rack's figures, https://www.nvidia.com/en-us/data-center/gb300-nvl72/; {_HALVED}"
GB200 = f"NVIDIA GB200 NVL72, half of the superchip's figures, https://www.nvidia.com/en-us/data-center/gb200-nvl72/; {_HALVED}"
P100 = "NVIDIA Tesla P100 data sheet (SXM2), https://images.nvidia.com/content/tesla/pdf/nvidia-tesla-p100-datasheet.pdf"
T4 = "NVIDIA T4 data sheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"
A30 = "NVIDIA A30 data sheet, https://www.nvidia.com/content/dam/en-zz/Solutions/data-center/products/a30-gpu/pdf/a30-datasheet.pdf"
A40 = "NVIDIA A40 data sheet, https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
L40 = "NVIDIA L40 data sheet, https://www.nvidia.com/content/dam/en-zz/Solutions/design-visualization/support-guide/NVIDIA-L40-Datasheet-January-2023.pdf"
A10 = "NVIDIA A10 data sheet, https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
A10G = "NVIDIA A10G of AWS's G5, https://www.baseten.co/blog/nvidia-a10-vs-a10g-for-ml-model-inference/"
L4 = f"NVIDIA L4 product page, https://www.nvidia.com/en-us/data-center/l4/; {_HALVED}"
L40S = "NVIDIA L40S data sheet, https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"
# Its sheet is 11 % above B200's, and its best products in bf16 4 % (1822 and 1745 TFLOP/s): so much less of what B200
# reaches of its own.
GB200_SHARE = 0.56
GB200_PRODUCTS = "ML Engineering, maximum achievable matmul FLOPS, https://github.com/stas00/ml-engineering, compute/accelerator/README.md"

_A100_FLOPS = {"float16": 312e12, "bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 9.7e12}
_H100_FLOPS = {
    "float8_e4m3fn": 1979e12,
    "float16": 989.5e12,
    "bfloat16": 989.5e12,
    "tf32": 494.5e12,
    "float32": 67e12,
    "float64": 34e12,
}
_V100_PCIE_FLOPS = {"float16": 112e12, "float32": 14e12, "float64": 7e12}

DATA_CENTER_CARDS: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="V100-SXM2-16GB",
        aliases=("v100-16gb", "v100-16"),
        memory_bytes=16 * 10**9,
        memory_bandwidth_bytes_per_s=900e9,
        peak_flops_per_s={"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12},
        power_w=300,
        sources=one_page(V100),
    ),
    CatalogueEntry(
        name="V100-PCIe-16GB",
        aliases=("tesla v100-pcie-16gb",),
        memory_bytes=16 * 10**9,
        memory_bandwidth_bytes_per_s=900e9,
        peak_flops_per_s=_V100_PCIE_FLOPS,
        sources=one_page(V100),
    ),
    CatalogueEntry(
        name="V100-PCIe-32GB",
        aliases=("v100-pcie",),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=900e9,
        peak_flops_per_s=_V100_PCIE_FLOPS,
        sources=one_page(V100),
    ),
    CatalogueEntry(
        name="V100S-PCIe-32GB",
        aliases=("v100s", "v100s-32gb", "tesla v100s"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=1134e9,
        peak_flops_per_s={"float16": 130e12, "float32": 16.4e12, "float64": 8.2e12},
        power_w=250,
        sources=one_page(V100),
    ),
    CatalogueEntry(
        name="V100-SXM2-32GB",
        aliases=("v100", "v100-32gb", "v100-32", "v100-sxm"),
        memory_bytes=32 * 10**9,
        memory_bandwidth_bytes_per_s=900e9,
        peak_flops_per_s={"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12},
        power_w=300,
        sources=one_page(V100),
    ),
    CatalogueEntry(
        name="A100-SXM4-40GB",
        aliases=("a100-40gb", "a100-40"),
        memory_bytes=40 * 10**9,
        memory_bandwidth_bytes_per_s=1555e9,
        peak_flops_per_s=_A100_FLOPS,
        power_w=400,
        sources=one_page(A100_40),
    ),
    CatalogueEntry(
        name="A100-PCIe-40GB",
        aliases=("nvidia a100-pcie-40gb",),
        memory_bytes=40 * 10**9,
        memory_bandwidth_bytes_per_s=1555e9,
        peak_flops_per_s=_A100_FLOPS,
        power_w=250,
        sources=one_page(A100_PCIE_40),
    ),
    CatalogueEntry(
        name="A100-SXM4-80GB",
        aliases=("a100", "a100-80gb", "a100-80", "a100-sxm"),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=2039e9,
        peak_flops_per_s=_A100_FLOPS,
        power_w=400,
        sources=one_page(A100),
    ),
    CatalogueEntry(
        name="A100-PCIe-80GB",
        aliases=("a100-pcie",),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=1935e9,
        peak_flops_per_s=_A100_FLOPS,
        power_w=300,
        sources=one_page(A100),
    ),
    CatalogueEntry(
        name="A800-SXM4-80GB",
        aliases=("a800", "a800-80gb", "a800-sxm"),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=2039e9,
        peak_flops_per_s=_A100_FLOPS,
        sources=one_page(A800),
    ),
    CatalogueEntry(
        name="H100-PCIe-80GB",
        aliases=("h100-pcie", "nvidia h100 pcie"),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=2e12,
        peak_flops_per_s={
            "float8_e4m3fn": 1513e12,
            "float16": 756.5e12,
            "bfloat16": 756.5e12,
            "tf32": 378e12,
            "float32": 51e12,
            "float64": 26e12,
        },
        power_w=350,
        sources=one_page(H100_PCIE),
    ),
    CatalogueEntry(
        name="H100-NVL-94GB",
        aliases=("h100-nvl", "nvidia h100 nvl"),
        memory_bytes=94 * 10**9,
        memory_bandwidth_bytes_per_s=3.9e12,
        peak_flops_per_s={
            "float8_e4m3fn": 1670.5e12,
            "float16": 835.5e12,
            "bfloat16": 835.5e12,
            "tf32": 417.5e12,
            "float32": 60e12,
            "float64": 30e12,
        },
        power_w=400,
        sources=one_page(H100),
    ),
    CatalogueEntry(
        name="H100-SXM-80GB",
        aliases=("h100", "h100-80gb", "h100-80", "h100-sxm", "nvidia h100 80gb hbm3"),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=3.35e12,
        peak_flops_per_s=_H100_FLOPS,
        power_w=700,
        sources=one_page(H100),
    ),
    CatalogueEntry(
        name="H800-SXM-80GB",
        aliases=("h800", "h800-80gb", "h800-80", "h800-sxm", "nvidia h800"),
        memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=3.35e12,
        peak_flops_per_s={**_H100_FLOPS, "float64": 1e12},
        sources=one_page(H800),
    ),
    CatalogueEntry(
        name="H20-SXM-96GB",
        aliases=("h20", "h20-96gb", "nvidia h20"),
        memory_bytes=96 * 10**9,
        memory_bandwidth_bytes_per_s=4e12,
        peak_flops_per_s={
            "float8_e4m3fn": 296e12,
            "float16": 148e12,
            "bfloat16": 148e12,
            "tf32": 74e12,
            "float32": 44e12,
            "float64": 1e12,
        },
        sources=one_page(H20) | {"matmul": TORCH_PRODUCTS},
        matmul_share=H20_SHARE,
    ),
    CatalogueEntry(
        name="H200-SXM-141GB",
        aliases=("h200", "h200-141gb", "h200-141", "h200-sxm"),
        memory_bytes=141 * 10**9,
        memory_bandwidth_bytes_per_s=4.8e12,
        peak_flops_per_s=_H100_FLOPS,
        power_w=700,
        sources=one_page(H200),
    ),
    CatalogueEntry(
        name="GH200-96GB",
        aliases=("gh200", "nvidia gh200 480gb", "nvidia gh200 96gb hbm3"),
        memory_bytes=96 * 10**9,
        memory_bandwidth_bytes_per_s=4e12,
        peak_flops_per_s=_H100_FLOPS,
        sources=one_page(GH200),
    ),
    CatalogueEntry(
        name="GH200-144GB",
        aliases=("gh200-144", "nvidia gh200 144g hbm3e"),
        memory_bytes=144 * 10**9,
        memory_bandwidth_bytes_per_s=4.9e12,
        peak_flops_per_s=_H100_FLOPS,
        sources=one_page(GH200),
    ),
    CatalogueEntry(
        name="B200-180GB",
        aliases=("b200", "b200-192gb", "b200-sxm"),
        memory_bytes=180 * 10**9,
        memory_bandwidth_bytes_per_s=8e12,
        peak_flops_per_s={
            "float4_e2m1fn": 9000e12,
            "float8_e4m3fn": 4500e12,
            "float16": 2250e12,
            "bfloat16": 2250e12,
            "tf32": 1125e12,
            "float32": 75e12,
            "float64": 37e12,
        },
        power_w=1000,
        sources={"memory": DGX_B200, "bandwidth": DGX_B200, "flops": HGX_B200},
    ),
    CatalogueEntry(
        name="B300-288GB",
        aliases=("b300", "nvidia b300 sxm6 ac"),
        memory_bytes=288 * 10**9,
        memory_bandwidth_bytes_per_s=8e12,
        peak_flops_per_s={
            "float4_e2m1fn": 13500e12,
            "float8_e4m3fn": 4500e12,
            "float16": 2250e12,
            "bfloat16": 2250e12,
            "tf32": 1125e12,
            "float32": 75e12,
            "float64": 1.25e12,
        },
        sources={"memory": DGX_B300, "bandwidth": DGX_B300, "flops": HGX_B300},
    ),
    CatalogueEntry(
        name="GB200-186GB",
        aliases=("gb200", "gb200-192gb", "gb200-nvl72"),
        memory_bytes=186 * 10**9,
        memory_bandwidth_bytes_per_s=8e12,
        peak_flops_per_s={
            "float4_e2m1fn": 10000e12,
            "float8_e4m3fn": 5000e12,
            "float16": 2500e12,
            "bfloat16": 2500e12,
            "tf32": 1250e12,
            "float32": 80e12,
            "float64": 40e12,
        },
        sources=one_page(GB200) | {"matmul": GB200_PRODUCTS},
        matmul_share=GB200_SHARE,
    ),
    CatalogueEntry(
        name="GB300-279GB",
        aliases=("gb300", "gb300-288gb", "gb300-nvl72"),
        memory_bytes=279 * 10**9,
        memory_bandwidth_bytes_per_s=8e12,
        peak_flops_per_s={
            "float4_e2m1fn": 15000e12,
            "float8_e4m3fn": 5000e12,
            "float16": 2500e12,
            "bfloat16": 2500e12,
            "tf32": 1250e12,
            "float32": 83e12,
            "float64": 1.39e12,
        },
        sources=one_page(GB300),
    ),
    CatalogueEntry(
        name="A10-24GB",
        aliases=("a10", "nvidia a10"),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=600e9,
        peak_flops_per_s={"float16": 125e12, "bfloat16": 125e12, "tf32": 62.5e12, "float32": 31.2e12},
        power_w=150,
        sources=one_page(A10),
    ),
    CatalogueEntry(
        name="A10G-24GB",
        aliases=("a10g", "nvidia a10g"),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=600e9,
        peak_flops_per_s={"float16": 70e12, "bfloat16": 70e12, "tf32": 35e12, "float32": 35e12},
        sources=one_page(A10G),
    ),
    CatalogueEntry(
        name="P100-SXM2-16GB",
        aliases=("p100", "p100-16gb"),
        memory_bytes=16 * 10**9,
        memory_bandwidth_bytes_per_s=732e9,
        peak_flops_per_s={"float16": 21.2e12, "float32": 10.6e12, "float64": 5.3e12},
        sources=one_page(P100),
    ),
    CatalogueEntry(
        name="T4-16GB",
        aliases=("t4",),
        memory_bytes=16 * 10**9,
        memory_bandwidth_bytes_per_s=320e9,
        peak_flops_per_s={"float16": 65e12, "float32": 8.1e12},
        sources=one_page(T4) | {"matmul": TORCH_PRODUCTS},
        matmul_share=T4_SHARE,
    ),
    CatalogueEntry(
        name="A30-24GB",
        aliases=("a30",),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=933e9,
        peak_flops_per_s={
            "float16": 165e12,
            "bfloat16": 165e12,
            "tf32": 82e12,
            "float32": 10.3e12,
            "float64": 5.2e12,
        },
        sources=one_page(A30),
    ),
    CatalogueEntry(
        name="A40-48GB",
        aliases=("a40",),
        memory_bytes=48 * 10**9,
        memory_bandwidth_bytes_per_s=696e9,
        peak_flops_per_s={"float16": 149.7e12, "bfloat16": 149.7e12, "tf32": 74.8e12, "float32": 37.4e12},
        sources=one_page(A40) | {"matmul": TORCH_PRODUCTS},
        matmul_share=A40_SHARE,
    ),
    CatalogueEntry(
        name="L40-48GB",
        aliases=("l40",),
        memory_bytes=48 * 10**9,
        memory_bandwidth_bytes_per_s=864e9,
        peak_flops_per_s={
            "float8_e4m3fn": 362e12,
            "float16": 181.05e12,
            "bfloat16": 181.05e12,
            "tf32": 90.5e12,
            "float32": 90.5e12,
        },
        sources=one_page(L40),
    ),
    CatalogueEntry(
        name="L4-24GB",
        aliases=("l4", "nvidia l4"),
        memory_bytes=24 * 10**9,
        memory_bandwidth_bytes_per_s=300e9,
        peak_flops_per_s={
            "float8_e4m3fn": 242.5e12,
            "float16": 121e12,
            "bfloat16": 121e12,
            "tf32": 60e12,
            "float32": 30.3e12,
        },
        power_w=72,
        sources=one_page(L4) | {"matmul": TORCH_PRODUCTS},
        matmul_share=L4_SHARE,
    ),
    CatalogueEntry(
        name="L40S-48GB",
        aliases=("l40s", "nvidia l40s"),
        memory_bytes=48 * 10**9,
        memory_bandwidth_bytes_per_s=864e9,
        peak_flops_per_s={
            "float8_e4m3fn": 733e12,
            "float16": 362.05e12,
            "bfloat16": 362.05e12,
            "tf32": 183e12,
            "float32": 91.6e12,
        },
        power_w=350,
        sources=one_page(L40S),
    ),
)
