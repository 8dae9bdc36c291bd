"""Steps that others published and that nothing was fitted to: within 15 %, where code and cluster are as described.

Llama 3 405B: Grattafiori et al. 2024 (arXiv:2407.21783), table 4: 16 M tokens a step, a pipeline of many chunks. The code is
Meta's own, of which Megatron Core's habits are assumed. Llama on 64 A100: https://github.com/pytorch/torchtitan,
docs/performance.md as of mid 2024; its `selective op` is what the preset's means.
"""

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import FSDP, MEGATRON_CORE

PIPELINE = {
    "tensor": 8, "pipeline": 16, "chunks": 8, "schedule": "interleaved", "sequence_parallel": True, "zero_stage": 1,
}  # fmt: skip
LLAMA_405B = [
    (1024, 8192, Layout(data=64, num_microbatches=32, **PIPELINE), 430e12),
    (2048, 8192, Layout(data=128, num_microbatches=16, **PIPELINE), 400e12),
    (2048, 131072, Layout(data=8, context=16, num_microbatches=16, **PIPELINE), 380e12),
]


@pytest.mark.parametrize("nodes, seq_len, layout, flops_per_s", LLAMA_405B)
def test_llama_3_405b_on_h100(nodes, seq_len, layout, flops_per_s):
    cluster = parse_cluster(f"8xH100-80GB-SXM,nodes={nodes},across=400Gbps")
    step = TrainingStep(layout=layout, seq_len=seq_len, software=MEGATRON_CORE.software)
    predicted = estimate_step(load_architecture("llama3-405b"), step, cluster)
    peak = cluster.accelerator.peak_flops_per_s["bfloat16"]
    assert predicted.mfu * peak == pytest.approx(flops_per_s, rel=0.15)


@pytest.mark.parametrize(
    "model, size, seq_len, recompute, tokens_per_s",
    [
        ("llama3-8b", 1, 8192, "selective", 2973),
        ("llama3-70b", 1, 8192, "full", 331),
        ("llama2-13b", 2, 4096, "none", 2162),
        ("llama2-13b", 2, 4096, "selective", 1904),
        ("llama2-70b", 1, 4096, "selective", 355),
        ("llama2-70b", 2, 4096, "full", 353),
    ],
)
def test_llama_under_fsdp_on_64_a100(model, size, seq_len, recompute, tokens_per_s):
    layout = Layout(data=64, zero_stage=3, micro_batch_size=size, recompute=recompute)
    step = TrainingStep(layout=layout, seq_len=seq_len, software=FSDP.software)
    predicted = estimate_step(load_architecture(model), step, parse_cluster("8xA100-80GB,nodes=8"))
    assert step.tokens / 64 / predicted.step_time_s == pytest.approx(tokens_per_s, rel=0.15)
