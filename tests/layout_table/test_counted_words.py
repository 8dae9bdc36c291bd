"""Accelerators counted in words, or by the machines that they are in."""

import pytest

from tests.layout_table.test_read import case_of

A100, H100 = "A100-SXM4-80GB", "H100-SXM-80GB"


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "card"),
    [
        ("4x DGX H100", 4, 8, H100),
        ("4 NVIDIA DGX A100 systems", 4, 8, A100),
        ("DGX-2", 1, 16, "V100-SXM2-32GB"),
        ("2 p5.48xlarge instances", 2, 8, H100),
        ("g5.12xlarge", 1, 4, "A10G-24GB"),
        ("a3-highgpu-8g", 1, 8, H100),
        ("single A100", 1, 1, A100),
        ("two RTX 3090s", 1, 2, "RTX-3090-24GB"),
        ("2x3090", 1, 2, "RTX-3090-24GB"),
        ("8\u5361 A100", 1, 8, A100),
        ("H100, 8 GPUs", 1, 8, H100),
        ("8 GPUs (H100)", 1, 8, H100),
        ("8-GPU A100 node", 1, 8, A100),
        ("A100 node", 1, 1, A100),
    ],
)
def test_counts_in_the_column_of_names(text, nodes, per_node, card):
    """Each was one accelerator, or as many as there are machines."""
    cluster = case_of(gpu=text).cluster
    assert (cluster.num_nodes, cluster.per_node, cluster.accelerator.name) == (nodes, per_node, card)


def test_columns_that_count_go_before_names():
    assert case_of(gpu="DGX H100", n_gpus="4").cluster.num_accelerators == 4
    assert case_of(gpu="4x DGX H100", n_gpus="16").cluster.num_accelerators == 16
    assert case_of(gpu="DGX H100", tp="4").cluster.num_accelerators == 4
    assert case_of(framework="4x DGX H100", gpu=None).cluster.num_accelerators == 32
