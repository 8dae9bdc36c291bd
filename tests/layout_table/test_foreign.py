"""Rows in other people's words: whatever they say together, a row has numbers that can be, or one line that says why not."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.layout_table.read import read_rows
from memadvisor.planning.predict_layouts import predict_row

NEEDED = {
    "Model": ("llama2-7b", "Mixtral 8x7B", "GPT-3 175B", "BERT-Large", "T5-11B", "ViT-H/14", "Mamba-2.8B", "1.3B", "Qwen3-30B-A3B"),
    "GPU type": ("NVIDIA A100-SXM4-80GB", "H100-80GB-HBM3", "V100 (32 GB)", "MI250X", "TPU v4", "RTX 4090", "GB200 NVL72", "p4d.24xlarge", ""),
    "# GPUs": ("8", "64.0", "1,024", "2x8", "8 GPUs"),
    "MBS": ("1", "2.0", "", "3"),
    "GBS": ("1024", "1k", "4M", ""),
    "Seq. length": ("2048", "4k", ""),
}  # fmt: skip
OPTIONAL = {
    "TP": ("1", "2", "TP4", "8-way", "3", "0", "None"),
    "PP": ("1", "4", "16", "-"),
    "CP": ("1", "2", "8"),
    "EP": ("1", "8", "64"),
    "Activation checkpointing": ("none", "Full", "selective", "TRUE", "no", "\u221a", "8/32 layers", "50%", "attention only", "smart"),
    "ZeRO": ("0", "ZeRO-1", "2.0", "Stage 3", "yes", "1+2", "4", "ZeRO-Infinity"),
    "PP schedule": ("1F1B", "GPipe", "Interleaved 1F1B", "ZB-H1", "DualPipe", "chimera", "foo"),
    "Virtual stages": ("1", "2", "interleaved", "no", ""),
    "SP": ("True", "0", "\u2713", "Ulysses", "-"),
    "Precision": ("bf16", "FP8", "16-mixed", "fp32", "?", "int8"),
    "Framework": ("Megatron-LM", "DeepSpeed", "PyTorch FSDP", "HF Trainer", "ours", "Alpa"),
    "Optimizer": ("Adam", "bnb AdamW8bit", "Adafactor", "Shampoo"),
    "Attention": ("FA3", "eager", "GQA", "False", "ring"),
    "Offload": ("none", "CPU", "params", "activations", "True"),
    "GPU mem (GB)": ("39.6", "40960 MiB", "-3", "64"),
    "Fine-tuning": ("full", "LoRA r=16", "QLoRA", "none"),
    "Dropout": ("0.1", "", "True"),
    "Note": ("OOM", "best", ""),
}  # fmt: skip
rows = st.fixed_dictionaries(
    {name: st.sampled_from(cells) for name, cells in NEEDED.items()},
    optional={name: st.sampled_from(cells) for name, cells in OPTIONAL.items()},
)


@given(rows)
@settings(max_examples=150, deadline=None)
def test_a_row_in_any_words_has_numbers_that_can_be_or_says_why_not(row):
    (read,) = read_rows([list(row), list(row.values())], "a test")
    found = predict_row(read)

    assert (found.prediction is None) == (found.error is not None)
    if found.prediction is None:
        assert found.error and len(found.error.splitlines()) == 1
        assert "no prediction comes out" not in found.error  # of formulas that left their range
        return
    estimate = found.prediction.estimate
    assert 0 < estimate.step_time_s < math.inf and 0 < estimate.peak_memory_bytes < math.inf
    assert 0 <= estimate.p_oom <= 1 and 0 < estimate.mfu <= estimate.hfu * (1 + 1e-9) and estimate.hfu < 1
