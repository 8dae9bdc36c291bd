"""Steps that were measured with this tool (docs/gpu.md), predicted once from a description before anybody looked at an error."""

from __future__ import annotations

from benchmarks.accuracy.first import First
from benchmarks.accuracy.measures import allocated, seconds
from benchmarks.accuracy.tables import Published

MEASURED = (
    Published(
        name="measured_h200",
        source="measured with this tool on one H200 (docs/gpu.md), torch 2.11",
        note="samples/train_gpt.py in fp32, under autocast and with weights in bf16, Hugging Face's Trainer on a GPT-2 of 8 layers (two micro-batches), and LoRA on a Llama of "
        "8 layers, none of them with memadvisor; the median of steps, from the third on, and max_memory_allocated. Times of the last two, which ran beside others, are left out. "
        "That torch's loops let gradients go, and what a GPT-2 of another size keeps, was not known blind. The machine's products reach 748 TFLOP/s by `calibrate`, 76 % of the "
        "sheet's, where all H100 and H200 are taken for 60 %: the second and third step are 16 and 18 % too slow for that. The first waits for its launches.",
        seconds=seconds,
        num_bytes=lambda table: table.peak_allocated_bytes,
        memory=allocated,
        group="precision",
    ),
)

FIRST_MEASURED = {
    "measured_h200": First(
        time_mape=0.277, time_bias=0.267, spearman=1.0, memory_mape=0.159, memory_bias=0.036
    ),
}
