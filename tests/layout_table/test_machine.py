"""The machine of a row: cards as people name and set them."""

import pytest

from memadvisor.planning.predict_layouts import predict_row
from tests.layout_table.test_read import case_of, read_one


def test_a_machine_among_other_words_names_its_card():
    found = case_of(gpu=None, cluster="p4d.24xlarge x 8", n_gpus="64").cluster
    assert found.accelerator.name == "A100-SXM4-40GB"


def rates(**columns):
    return case_of(**columns).cluster.accelerator.peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("3090", "RTX-3090-24GB"),
        ("RTX 2080Ti", "RTX-2080-Ti-11GB"),
        ("8x GeForce RTX 4090", "RTX-4090-24GB"),
        ("H100-80GB-HBM3", "H100-SXM-80GB"),
        ("DGX-H100", "H100-SXM-80GB"),
        ("NVIDIA A10G", "A10G-24GB"),
        ("MI350X", "MI350X-288GB"),
        ("AMD MI250X (1 GCD)", "MI250X-die-64GB"),
        ("A100x8", "A100-SXM4-80GB"),
        ("p4d.24xlarge", "A100-SXM4-40GB"),
        ("GB200 NVL72", "GB200-186GB"),
        ("Titan RTX", "TITAN-RTX-24GB"),
        ("Intel Gaudi2", "Gaudi-2-96GB"),
        ("Gaudi 3", "Gaudi-3-128GB"),
        ("HL-225", "Gaudi-2-96GB"),
        ("HL-325L", "Gaudi-3-128GB"),
        ("Tesla V100S-PCIE-32GB", "V100S-PCIe-32GB"),
        ("TPU Trillium", "TPU-v6e-32GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-96GB"),
        ("v5litepod-256", "TPU-v5e-16GB"),
        ("TPU v5p-128", "TPU-v5p-95GB"),
        ("p4de", "A100-SXM4-80GB"),
        ("RTX 4090 D", "RTX-4090-D-24GB"),
        ("4090D", "RTX-4090-D-24GB"),
        ("NVIDIA L20", "L20-48GB"),
        ("Huawei Ascend 910B NPU", "Ascend-910B3-64GB"),
        ("Ascend910B2", "Ascend-910B2-64GB"),
        ("Atlas 900 A2 PODc", "Ascend-910B3-64GB"),
    ],
)
def test_names_of_cards(name, card):
    assert case_of(gpu=name).cluster.accelerator.name == card


def test_a_card_under_less_power_is_slower_by_the_cube_root():
    sold, less = rates(gpu="H100"), rates(gpu="H100", gpu_power_w="350")
    assert less["bfloat16"] == pytest.approx(sold["bfloat16"] / 2 ** (1 / 3))
    assert rates(gpu="H100", gpu_power_w="1000") == sold
    error = read_one(gpu="TPU v4", gpu_power_w="150").error
    assert "gpu_power_w is 150" in str(error)


def test_a_card_with_other_memory():
    card = case_of(gpu="H100 96GB", gpu_bandwidth_gb_s="2400").cluster.accelerator
    assert (card.memory_bytes, card.memory_bandwidth_bytes_per_s) == (96 * 10**9, 2.4e12)


@pytest.mark.parametrize(
    ("name", "memory", "card", "gigabytes"),
    [
        ("A100", "39.6", "A100-SXM4-40GB", 40),  # GiB, as torch reports them
        ("A100", "40960 MiB", "A100-SXM4-40GB", 40),  # as nvidia-smi does
        ("A100", "81920", "A100-SXM4-80GB", 80),
        ("V100", "34.1", "V100-SXM2-32GB", 32),  # GiB counted in GB
        ("NVIDIA A100-SXM4-80GB", "39.4", "A100-SXM4-40GB", 40),
        ("A100", "64", "A100-SXM4-80GB", 64),
        ("RTX 4090", "48", "RTX-4090-24GB", 48),
        ("MI250X", "128", "MI250X-die-64GB", 64),
    ],
)
def test_the_memory_of_a_card_has_its_own_column(name, memory, card, gigabytes):
    row = read_one(gpu=name, gpu_mem_gb=memory)
    found = row.case.cluster.accelerator
    assert (found.name, found.memory_bytes) == (card, gigabytes * 10**9)
    assert any(f"with {gigabytes} GB" in note for note in row.notes) == (not card.endswith(f"{gigabytes}GB"))


def test_more_memory_is_never_less_likely_to_be_enough():
    rows = (
        read_one(gpu="A100", gpu_mem_gb=size) for size in ("2", "3", "4", "6", "8", "16", "39", "80", "192")
    )
    chances = [predict_row(row).prediction.estimate.p_oom for row in rows]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.9 > 0.1 > chances[-1]


@pytest.mark.parametrize(
    ("words", "rate", "card"),
    [
        ("25 Gb/s ethernet", 25e9 / 64, 25e9 / 8),
        ("4x200 Gb/s RoCE", 4 * 200e9 / 64, 25e9),
        ("2xHDR", 2 * 200e9 / 64, 25e9),
        ("1.6 Tb/s per node", 200e9 / 8, None),
        ("400 Gb/s per gpu", 50e9, None),
    ],
)
def test_cards_that_accelerators_share(words, rate, card):
    """A node's rate is one card's up to 400 Gb/s; more is that of no one knows how many."""
    across = case_of(
        gpu="RTX 4090", n_gpus="16", gpus_per_node="8", dp="16", interconnect=words
    ).cluster.across
    assert (across.bytes_per_s, across.card_bytes_per_s) == (rate, card)


@pytest.mark.parametrize(
    ("columns", "nodes", "per_node", "said"),
    [
        ({"gpu": "GB200", "n_gpus": "256", "gpus_per_node": "4"}, 4, 64, "join 64"),
        ({"gpu": "GB300", "n_gpus": "72", "nodes": "18"}, 1, 72, "join 72"),
        ({"gpu": "TPU v5e", "n_gpus": "64", "gpus_per_node": "8"}, 1, 64, "join 64"),
        ({"gpu": "GB200 NVL4", "n_gpus": "16", "gpus_per_node": "4"}, 4, 4, ""),
        ({"gpu": "GB300", "n_gpus": "256", "gpus_per_node": "72"}, 4, 64, "do not fill nodes of 72"),
        ({"gpu": "H100", "n_gpus": "12", "gpus_per_node": "8"}, 2, 6, "do not fill nodes of 8"),
    ],
)
def test_trays_of_a_rack_and_nodes_that_are_not_full(columns, nodes, per_node, said):
    """Trays of four were taken for nodes with a network between them, which exchanges of experts took thrice as long over."""
    row = read_one(**columns)
    assert row.case is not None
    assert (row.case.cluster.num_nodes, row.case.cluster.per_node) == (nodes, per_node)
    assert said in "; ".join(row.notes)


def test_the_network_of_a_rack_is_that_of_its_trays():
    """Four cards of 400 Gbit/s are a tray's."""
    cluster = case_of(gpu="GB200", n_gpus="256", gpus_per_node="4", interconnect="4x400 Gb/s").cluster
    assert cluster.across.bytes_per_s == pytest.approx(50e9)
