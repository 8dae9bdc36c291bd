import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.links import group_of, message_seconds
from memadvisor.hardware.clusters import make_cluster as named_cluster
from memadvisor.hardware.clusters import network_link
from memadvisor.hardware.load import named_hardware
from tests.cost.layouts.nodes import make_cluster

INSIDE, ACROSS = 400e9, 50e9


@pytest.mark.parametrize("size, stride, near", [(8, 1, 8), (16, 1, 8), (4, 8, 1), (4, 4, 2), (2, 2, 2)])
def test_neighbours_that_are_far_apart_in_number_lie_on_other_nodes(size, stride, near):
    assert group_of(make_cluster(64, inside=INSIDE, across=ACROSS), size, stride, FITTED).near == near


def test_a_ring_through_nodes_has_the_network_shares_of_its_ranks_side_by_side():
    alone, together = (
        group_of(make_cluster(64, inside=INSIDE, across=ACROSS), 8, 8, FITTED),
        group_of(make_cluster(64, inside=INSIDE, across=ACROSS), 16, 1, FITTED),
    )
    assert alone.bytes_per_s == ACROSS * FITTED.across_share
    assert together.bytes_per_s == min(8 * ACROSS * FITTED.across_share, INSIDE * FITTED.inside_share)


def test_cards_on_a_bus_share_what_lies_between_processors():
    """PCIe 4.0 alone: three quarters of 32 GB/s for four, 16 GB/s for eight."""
    card = named_hardware("RTX 4090")
    node = named_cluster(card, num_nodes=1, per_node=8)
    assert [group_of(node, size, 1, FITTED).bytes_per_s for size in (4, 8)] == [24e9, 16e9]


def test_a_mesh_without_a_switch_gives_a_group_the_links_among_its_ranks():
    """Of an MI300X's seven links two ranks have one, four have three each; NVLink's switch gives any all of it."""
    amd, nvidia = (
        named_cluster(named_hardware(name), num_nodes=1, per_node=8) for name in ("MI300X", "H100")
    )
    alone, quad, all_of_it = (group_of(amd, size, 1, FITTED).bytes_per_s for size in (2, 4, 8))
    assert (alone, quad) == (pytest.approx(all_of_it / 7), pytest.approx(all_of_it * 3 / 7))
    assert all_of_it == pytest.approx(316e9, rel=0.01)  # as RCCL's all-reduce among eight was measured
    assert group_of(nvidia, 2, 1, FITTED).bytes_per_s == group_of(nvidia, 8, 1, FITTED).bytes_per_s
    # A message goes over the one link there is.
    assert message_seconds(amd, 64e9, 2, 1, FITTED)[0] > 1.0


def test_two_v100_of_a_cube_mesh_have_one_of_six_links_between_them():
    """NVIDIA DGX-1: ranks 0 and 1 are joined by one link of 25 GB/s, all eight by six each."""
    node = named_cluster(named_hardware("V100-SXM2-32GB"), num_nodes=1, per_node=8)
    rates = [group_of(node, size, 1, FITTED).bytes_per_s / FITTED.inside_share for size in (2, 4, 8)]

    assert rates == pytest.approx([25e9, 75e9, 150e9])


@pytest.mark.parametrize(("name", "near", "reached"), [("MI325X", 8, 319e9), ("MI355X", 8, 386e9), ("MI355X", 4, 162e9)])  # fmt: skip
def test_rings_over_links_one_by_one_reach_what_rccl_was_measured_to(name, near, reached):
    """Exchanges go straight from each to each, of which nothing is known but the sheet's rate."""
    group = group_of(named_cluster(named_hardware(name), num_nodes=1, per_node=8), near, 1, FITTED)
    assert group.bytes_per_s == pytest.approx(reached, rel=0.025)
    assert group.exchange_bytes_per_s == pytest.approx(group.bytes_per_s * FITTED.inside_share / 0.705)


def test_ranks_that_alone_send_to_another_node_have_its_cards_to_themselves():
    """Two nodes of eight with one card of 3.2 GB/s: of a stage's four ranks each has a quarter, of eight an eighth; of four such
    cards one rank has no more than one."""
    cards = named_hardware("RTX 4090")
    rates = []
    for num_cards, stride in ((1, 8), (1, 4), (4, 8), (4, 4), (4, 1)):
        link = network_link(num_cards * 3.2e9 / 8, "", 3.2e9)
        node = named_cluster(cards, num_nodes=2, per_node=8, across=link)
        seconds = message_seconds(node, 1e15, 16 // stride, stride, FITTED)[8 // stride - 1]
        rates.append(1e15 / seconds / FITTED.across_share)
    assert rates == pytest.approx([0.4e9, 0.8e9, 1.6e9, 3.2e9, 3.2e9])


def test_one_rank_moves_nothing():
    assert (
        group_of(make_cluster(8, inside=INSIDE, across=ACROSS), 1, 1, FITTED).seconds("all_reduce", 1e9)
        == 0.0
    )


@given(st.integers(1, 6), st.integers(0, 3), st.floats(1.0, 1e10), st.integers(1, 50))
def test_more_bytes_or_more_messages_are_never_quicker(log_size, log_stride, size_bytes, messages):
    group = group_of(make_cluster(512, inside=INSIDE, across=ACROSS), 2**log_size, 2**log_stride, FITTED)
    for operation in ("all_reduce", "all_gather", "reduce_scatter"):
        seconds = group.seconds(operation, size_bytes, messages)
        assert seconds <= group.seconds(operation, 2 * size_bytes, messages)
        assert seconds <= group.seconds(operation, size_bytes, messages + 1)
    assert group.seconds("all_reduce", size_bytes) <= 2 * group.seconds("all_gather", size_bytes)


@given(st.integers(0, 6), st.integers(0, 3), st.floats(1e-7, 1e-3), st.floats(1e-7, 1e-3))
def test_a_ring_passes_the_network_once_for_each_further_node(log_size, log_stride, inside_s, across_s):
    """Latencies are those of the links that the cluster was given, and no coefficient's."""
    cluster = make_cluster(64, inside=INSIDE, across=ACROSS, inside_s=inside_s, across_s=across_s)
    size = 2**log_size
    group = group_of(cluster, size, 2**log_stride, FITTED)
    links = [inside_s if (rank + 1) % group.near else across_s for rank in range(size - 1)]
    assert group.ring_latency_s == pytest.approx(sum(links))
    assert group.nodes == size // group.near


def test_a_tree_reduces_little_among_many_and_a_ring_much_among_few():
    few, many = (
        group_of(make_cluster(512, inside=INSIDE, across=ACROSS, across_s=10e-6), size, 8, FITTED)
        for size in (2, 64)
    )
    little, much = 1e4, 1e10
    assert many.seconds("all_reduce", little) < 2 * many.seconds("all_gather", little) - many.call_s
    assert few.seconds("all_reduce", much) == pytest.approx(2 * few.seconds("all_gather", much) - few.call_s)
