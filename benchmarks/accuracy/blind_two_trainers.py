"""Published tables of two trainers' comparisons that were predicted once before anybody looked at an error of them."""

from __future__ import annotations

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import seconds
from benchmarks.accuracy.tables import Published

TWO_TRAINERS = (
    Published(
        name="automodel_moe_h100",
        source="NVIDIA NeMo AutoModel (github.com/NVIDIA-NeMo/Automodel, docs/performance-summary.mdx of June 2026, and its post on experts)",
        note="Moonlight 16B-A3B, GPT-OSS 20B and 120B on 8 and 64 H100, FSDP2 with tokens shared evenly among experts. How many ranks share experts, and what is "
        "recomputed, the pages leave open: both are those of its benchmark configurations (examples/benchmark/configs, at revision 037e04a6). Of GPT-OSS "
        "120B it was first a later one (examples/llm_benchmark), with half the micro-batch and all recomputed, as its blind prediction had it. Nemotron 3 Super and Ultra, whose experts see a "
        "narrower stream, are left out.",
        seconds=seconds,
        group="model",
    ),
    Published(
        name="tprimat_h100_mi300x",
        source="A comparison of NeMo and Primus (github.com/DmitriiNikolaevAtAmd/tprimat, output and output_prev, January and February 2026)",
        note="Llama 3.1 8B and Qwen2.5 7B on 8 H100 by NeMo in FP8 and on 8 MI300X by Primus in bf16, sequences of 2,048 one at a time: means over 500 steps, the first "
        "ones among them. NeMo took two to three times as long as predicted, and as others' NeMo does; what held it up its scripts do not tell. Precision and recomputation are those of its scripts; of the row of 8,192 tokens the tensor-parallel degree too. A row whose degrees its "
        "pages leave open is left out. Memory is the peak reserved.",
        seconds=seconds,
        num_bytes=lambda table: table.reserved_gb * 1e9,
        group="gpu",
    ),
)

FIRST_TWO_TRAINERS = {
    "automodel_moe_h100": First(time_mape=0.417, time_bias=0.337, spearman=1.0),
    "tprimat_h100_mi300x": First(
        time_mape=0.484, time_bias=-0.484, spearman=0.0, memory_mape=0.016, memory_bias=-0.016
    ),
}
