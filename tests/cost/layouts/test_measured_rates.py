"""Rates that were measured on the machine itself stand for what kernels reach, and not for what a data sheet names."""

import pytest

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.kernels import device_of, matmul_seconds, stream_seconds
from memadvisor.hardware.cluster import Cluster
from memadvisor.hardware.hardware import Hardware
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_dtypes import with_precision
from memadvisor.software_torch import DDP

# `memadvisor calibrate` on the H200 of docs/gpu.md.
H200 = Hardware(
    name="NVIDIA H200",
    kind="measured",
    source="docs/gpu.md",
    memory_bytes=150_109_880_320,
    memory_bandwidth_bytes_per_s=4.14e12,
    peak_flops_per_s={"float32": 51.3e12, "bfloat16": 748e12, "float16": 736e12},
)
CLUSTER = Cluster(accelerator=H200, num_nodes=1, per_node=1, inside=None, across=None)


def test_a_large_product_takes_about_what_the_best_one_took():
    device = device_of(H200, "bfloat16", FITTED)
    best_s = 2 * 8192**3 / 748e12

    assert best_s < matmul_seconds(device, 8192, 8192, 8192) < 1.1 * best_s


def test_a_kernel_streams_as_of_a_sheet_whose_copies_are_measured():
    """0.66 of a sheet's bandwidth, of which a copy reaches 0.88."""
    device = device_of(H200, "bfloat16", FITTED)

    assert stream_seconds(device, 4.14e12) == pytest.approx(0.88 / 0.66)


def gpt(n_layers, hidden, n_heads, positions):
    """samples/train_gpt.py"""
    return Architecture(
        name="gpt", n_layers=n_layers, hidden=hidden, n_heads=n_heads, n_kv_heads=n_heads, head_dim=hidden // n_heads,
        ffn=4 * hidden, vocab=256, tied_embeddings=False, gated_mlp=False, positions=positions, biases=True, norm_vectors=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "precision", "sequences", "measured_s", "measured_bytes"),
    [
        (gpt(12, 2048, 16, 1024), "amp_bf16", 16, 0.1344, 23_720_879_616),
        (gpt(24, 2304, 18, 1024), "pure bf16", 8, 0.1614, 24_191_891_456),
        (gpt(12, 2048, 16, 512), "fp32", 2, 0.0998, 12_196_184_576),
    ],
)
def test_steps_of_docs_gpu_are_near_what_that_card_took(
    model, precision, sequences, measured_s, measured_bytes
):
    software = with_precision(DDP.software, precision)
    layout = Layout(micro_batch_size=sequences)
    step = TrainingStep(layout=layout, seq_len=model.positions, software=software)
    found = estimate_step(model, step, CLUSTER)

    assert found.step_time_s == pytest.approx(measured_s, rel=0.09)
    assert found.worst.allocated_bytes == pytest.approx(measured_bytes, rel=0.015)
