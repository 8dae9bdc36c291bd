"""A cluster is what its words say; links that nobody names are published ones, or an error."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.errors import MemadvisorError, UnknownHardwareError, UsageError
from memadvisor.hardware.catalogue import CATALOGUE, find_entry
from memadvisor.hardware.clusters import make_cluster, parse_cluster
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.links import LINKS


def test_nodes_and_links_of_the_vendors_own_node():
    cluster = parse_cluster("8xH100,nodes=4")

    assert cluster.num_accelerators == 32
    assert cluster.inside.bytes_per_s == 450e9
    assert cluster.across.bytes_per_s == 50e9 and "DGX H100" in cluster.across.source
    assert cluster.host.bytes_per_s == 64e9


def test_superchips_of_a_node_have_nvlink_among_them():
    """Six of the eighteen links of each GH200 go to each of the other three; each has a network card."""
    cluster = parse_cluster("4xGH200,nodes=2")

    assert cluster.inside.kind == "NVLink"
    assert (cluster.inside.bytes_per_s, cluster.inside.num_peers) == (450e9, 3)
    assert cluster.across.bytes_per_s == 25e9


@pytest.mark.parametrize("inside", ["", ",inside=nvlink"])
@pytest.mark.parametrize(
    "text, num_peers",
    [
        ("8xV100,nodes=2", 6),  # the DGX-1's cube mesh
        ("4xV100", 6),
        ("16xV100", None),  # the DGX-2 has switches
        ("4xA100,nodes=2", 3),  # boards of four have none
        ("4xH100,nodes=8", 3),
        ("8xA100,nodes=2", None),
        ("4xA100", None),  # may be a part of eight
        ("4xH800,nodes=2", None),  # not sold in fours
    ],
)
def test_whether_links_of_a_node_go_through_a_switch(text, num_peers, inside):
    assert parse_cluster(text + inside).inside.num_peers == num_peers


def test_links_as_given():
    cluster = parse_cluster("4 x L40S, nodes=2, across=8x100Gbps, inside=pcie")

    assert cluster.across.bytes_per_s == 8 * 12.5e9 / 4
    assert parse_cluster("8xH100,nodes=2,across=2x100Gbps").across.card_bytes_per_s == 12.5e9
    assert parse_cluster("8xV100,nodes=2").across.card_bytes_per_s == 12.5e9
    assert cluster.inside.bytes_per_s == 32e9
    assert parse_cluster("8xH100,nodes=2,across=50GB/s,inside=100GB/s").inside.bytes_per_s == 100e9


def test_one_accelerator_has_no_links_to_others():
    cluster = parse_cluster("A100-40GB")
    assert (cluster.num_accelerators, cluster.inside, cluster.across) == (1, None, None)


@pytest.mark.parametrize(
    "text",
    ["", "8x", "0xH100", "8xH100,nodes=0", "8xH100,nodes=two", "8xH100,racks=2", "8xH100,nodes=2,nodes=3",
     "8xH100,nodes=2,across=fast", "8xZ80", "64xH100", "2xL4,inside=nvlink", "8xH100,nodes"],
)  # fmt: skip
def test_nonsense_is_one_line(text):
    with pytest.raises(MemadvisorError) as caught:
        parse_cluster(text)
    assert caught.value.hint and "\n" not in caught.value.one_line()


def test_a_network_that_nobody_publishes_must_be_given():
    with pytest.raises(UnknownHardwareError):
        parse_cluster("8xL4,nodes=2")
    own = Hardware(
        name="mine",
        kind="measured",
        source="a test",
        memory_bytes=1,
        memory_bandwidth_bytes_per_s=1.0,
        peak_flops_per_s={},
    )
    with pytest.raises(UnknownHardwareError):
        make_cluster(own, num_nodes=1, per_node=2)


def test_every_device_has_its_links_and_no_two_devices_have_one_name():
    assert set(LINKS) == {entry.name for entry in CATALOGUE}
    for entry in CATALOGUE:
        for name in (entry.name, *entry.aliases):
            assert find_entry(name) is entry


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("H100-80GB-SXM", "H100-SXM-80GB"),
        ("a100_80gb", "A100-SXM4-80GB"),
        ("a100_40gb", "A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("H800-80GB", "H800-SXM-80GB"),
        ("A100 80GB PCIe", "A100-PCIe-80GB"),
    ],
)
def test_names_that_tables_and_drivers_use(name, entry):
    assert find_entry(name).name == entry


@given(st.integers(1, 16), st.integers(1, 4096), st.floats(0.1, 1e4))
def test_what_is_written_is_what_is_read(per_node, num_nodes, gbps):
    cluster = parse_cluster(f"{per_node}xH100,nodes={num_nodes},across={gbps:.6f}Gbps")

    assert (cluster.per_node, cluster.num_nodes) == (per_node, num_nodes)
    if num_nodes > 1:
        assert cluster.across.bytes_per_s == pytest.approx(gbps * 1e9 / 8, rel=1e-4)


@given(st.text(alphabet="8xH100,nodes=acrinpe4Gb/s ", max_size=30))
def test_any_text_gives_a_cluster_or_one_line(text):
    with contextlib.suppress(UsageError, UnknownHardwareError):
        assert parse_cluster(text).num_accelerators >= 1
