import math
from dataclasses import replace

import pytest

from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.data_parallel import (
    bare_seconds,
    microbatch_traffic,
    optimizer_seconds,
    replica_groups,
    step_traffic,
)
from memadvisor.cost.layouts.links import Group
from memadvisor.cost.layouts.memory import (
    StageParameters,
    device_contents,
    stage_memory,
    stage_parameters,
)
from memadvisor.cost.pipelines.groups import passes_beside
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import find_preset
from memadvisor.software_traits import Software
from tests.planning.small_spaces import make_model


def one_byte_a_second(size, stride):
    return Group(
        size=size, near=1, nodes=size, bytes_per_s=1.0, exchange_bytes_per_s=1.0, own_bytes_per_s=1.0, ring_latency_s=0.0,
        tree_latency_s=0.0, tree_share=1.0,
        call_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("expert, holders", [(1, 8), (2, 4), (8, 1)])
def test_stage_3_gathers_experts_among_those_that_hold_the_same_ones(expert, holders):
    """Each rank receives what others hold of its parameters: none of experts that it alone has."""
    layout = Layout(data=8, expert=expert, zero_stage=3)
    step = TrainingStep(layout=layout, seq_len=1024, software=Software(parameter_bytes=2, reduce_bytes=4))
    count = StageParameters(shared=800.0, experts=1600.0 / expert, widest_layer=0.0)
    forward_s, backward_s = microbatch_traffic(
        step, count, replica_groups(layout, one_byte_a_second, host_bytes_per_s=None)
    )
    received = 800 * 7 / 8 + 1600 / expert * (holders - 1) / holders
    assert forward_s == pytest.approx(2 * received)
    assert backward_s == pytest.approx((2 + 4) * received)
    assert count.sharded(layout) == pytest.approx(800 / 8 + 1600 / expert / holders)


def test_stage_3_pays_latency_for_each_unit_that_it_gathers():
    """4 ranks, a second for each of 3 links: 5 units' gathers take 5 rounds of latency, as do their reductions."""
    layout = Layout(data=4, zero_stage=3)
    step = TrainingStep(layout=layout, seq_len=1024, software=Software(parameter_bytes=2, reduce_bytes=4))
    count = StageParameters(shared=400.0, experts=0.0, widest_layer=0.0, units=5)

    def slow(size, stride):
        return replace(one_byte_a_second(size, stride), ring_latency_s=3.0, call_s=0.5)

    forward_s, backward_s = microbatch_traffic(
        step, count, replica_groups(layout, slow, host_bytes_per_s=None)
    )
    assert forward_s == pytest.approx(2 * 300 + 5 * 3.5)
    assert backward_s == pytest.approx(6 * 300 + 2 * 5 * 3.5)


@pytest.mark.parametrize("tied, units", [(False, 4 + 2), (True, 4 + 1)])
def test_a_layer_is_a_unit_as_are_the_ends_of_the_model(tied, units):
    step = TrainingStep(layout=Layout(), seq_len=64)
    counted = stage_parameters(make_model(4, tied=tied), step, device_contents((0,), (4,)))
    assert (counted.units, counted.expert_units) == (units, 0)


@pytest.mark.parametrize("whole", [False, True])
def test_pipelines_of_torch_gather_and_reduce_once_a_step(whole):
    """Of 4 microbatches each has a quarter of one gather and one reduction, and none for its backward."""
    layout = Layout(data=4, pipeline=2, zero_stage=3, num_microbatches=4)
    software = Software(parameter_bytes=2, reduce_bytes=4, whole_in_pipelines=whole)
    count = StageParameters(shared=400.0, experts=0.0, widest_layer=0.0)
    times = microbatch_traffic(
        TrainingStep(layout=layout, seq_len=64, software=software),
        count,
        replica_groups(layout, one_byte_a_second, host_bytes_per_s=None),
    )
    assert times == pytest.approx((2 * 300 / 4, 4 * 300 / 4) if whole else (2 * 300, 6 * 300))


@pytest.mark.parametrize("whole", [False, True])
def test_pipelines_of_torch_sum_whole_gradients_under_stage_2_too(whole):
    """Of 4 microbatches one reduction in place of four, of gradients that are as large as under stage 0."""
    layout = Layout(data=4, pipeline=2, zero_stage=2, num_microbatches=4)
    software = Software(parameter_bytes=2, reduce_bytes=4, whole_in_pipelines=whole)
    step = TrainingStep(layout=layout, seq_len=64, software=software)
    count = StageParameters(shared=400.0, experts=0.0, widest_layer=0.0)
    reduce_s, _ = step_traffic(step, count, replica_groups(layout, one_byte_a_second, host_bytes_per_s=None))
    assert reduce_s == pytest.approx((1 if whole else 4) * 4 * 300)
    contents = device_contents((0,), (2, 2))
    model = make_model(4)
    held = stage_memory(model, step, contents, 0.0, FITTED).gradient_bytes
    every = 4.0 * stage_parameters(model, step, contents).all
    assert held == pytest.approx(every if whole else every / 4)


def test_a_token_leaves_once_for_each_other_node():
    """Two nodes, each byte to two experts: with the chance of a quarter both are at home."""
    group = replace(one_byte_a_second(2, 1), exchange_bytes_per_s=4.0)
    assert group.dispatch_seconds(100.0, copies=2) == pytest.approx(100 * (1 - 1 / 4))
    # To one node alone, which half of the time is its own.
    assert group.dispatch_seconds(100.0, copies=2, most_nodes=1) == pytest.approx(100 / 2)


@pytest.mark.parametrize("collective_s", [0.5, 3.0, 10.0, 40.0])
@pytest.mark.parametrize("chunks, passes", [(1, 1), (3, 4), (2, 8)])
def test_parts_of_a_looped_pipeline_reduce_under_those_that_come_after(collective_s, chunks, passes):
    """Played part by part: each begins with its last microbatch's pass, when the one before it is through."""
    each_s, own_s, end_s = collective_s / chunks, 3.0 / chunks, 0.0
    for part in range(1, chunks + 1):
        end_s = max(end_s, part * passes * own_s - own_s) + each_s
    bare_s = max(0.0, end_s - chunks * passes * own_s)
    assert bare_seconds(collective_s, 3.0, chunks, passes) == pytest.approx(bare_s)


@pytest.mark.parametrize(
    "schedule, chunks, passes",
    [("1f1b", 1, 1), ("interleaved", 3, 4), ("1f1b", 3, 4), ("breadth-first", 3, 16), ("zb-v", 2, 1)],
)
def test_a_group_of_microbatches_passes_a_part_as_many_as_there_are_stages(schedule, chunks, passes):
    """All of them, breadth-first."""
    assert passes_beside(schedule, chunks, num_stages=4, num_microbatches=16) == passes


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_parameters_go_round_as_their_products_take_them(dtype, size):
    layout = Layout(data=4, zero_stage=1)
    software = Software(compute_dtype=dtype, gathers_narrow=True, reduce_bytes=2)
    groups = replica_groups(layout, one_byte_a_second, host_bytes_per_s=None)
    count = StageParameters(shared=400.0, experts=0.0, widest_layer=0.0)
    reduce_s, gather_s = step_traffic(
        TrainingStep(layout=layout, seq_len=64, software=software), count, groups
    )
    assert (reduce_s, gather_s) == pytest.approx((2 * 300, size * 300))


def test_stage_2_reduces_a_part_of_a_looped_pipeline_once_for_each_group_of_microbatches():
    """8 microbatches over 4 stages are two groups; breadth-first they are one, and without parts of the model eight."""
    software = Software(parameter_bytes=2, gradient_bytes=4, reduce_bytes=4)
    count = StageParameters(shared=400.0, experts=0.0, widest_layer=0.0)
    groups = replica_groups(Layout(data=4, zero_stage=2), one_byte_a_second, host_bytes_per_s=None)
    found = {}
    for schedule, chunks in (("interleaved", 2), ("breadth-first", 2), ("1f1b", 1)):
        layout = Layout(
            data=4, pipeline=4, zero_stage=2, num_microbatches=8, schedule=schedule, chunks=chunks
        )
        step = TrainingStep(layout=layout, seq_len=64, software=software)
        found[schedule] = step_traffic(step, count, groups)[0] / (4 * 300)
    assert found == pytest.approx({"interleaved": 2, "breadth-first": 1, "1f1b": 8})


def test_gradients_of_two_parts_of_a_looped_pipeline_are_whole_under_stage_2():
    """Of the part that microbatches are passing, and of the one whose gradients are on their way."""
    contents, model = device_contents((0, 4), (1,) * 8), make_model(8)
    layout = Layout(data=8, pipeline=4, zero_stage=2, num_microbatches=4, schedule="interleaved", chunks=4)
    software = Software(gradient_bytes=4)

    def held(layout):
        step = TrainingStep(layout=layout, seq_len=64, software=software)
        count = stage_parameters(model, step, contents)
        return stage_memory(model, step, contents, 0.0, FITTED).gradient_bytes / (4.0 * count.all)

    assert held(layout) == pytest.approx(1 / 8 + 2 / 4)
    assert held(replace(layout, chunks=1, schedule="1f1b")) == pytest.approx(1 / 8)
    assert held(replace(layout, num_microbatches=1)) == pytest.approx(1 / 8)


@pytest.mark.parametrize("replicas, overlaps, reduce_messages", [(8, True, 10), (80, True, 5), (8, False, 1)])
def test_megatron_sizes_its_buckets_by_elements_and_replicas(replicas, overlaps, reduce_messages):
    """400 M elements by buckets of 40 M, of 1 M for each of more than 40 replicas, or all at once behind the backward."""
    layout = Layout(data=replicas, zero_stage=1)
    software = replace(find_preset("megatron-core").software, overlap_reduce=overlaps)
    step = TrainingStep(layout=layout, seq_len=1024, software=software)
    count = StageParameters(shared=400e6, experts=0.0, widest_layer=0.0)

    def latency_alone(size, stride):
        return replace(one_byte_a_second(size, stride), bytes_per_s=math.inf, ring_latency_s=1.0)

    reduce_s, gather_s = step_traffic(
        step, count, replica_groups(layout, latency_alone, host_bytes_per_s=None)
    )
    assert reduce_s == gather_s == reduce_messages


@pytest.mark.parametrize(("trainer", "ranks", "rate"), [("deepspeed", 8, 5e9), ("deepspeed", 1, 25e9), ("megatron-core", 8, 25e9)])  # fmt: skip
def test_what_updates_on_the_host_by_deepspeed_take_where_ranks_share_its_cores(trainer, ranks, rate):
    """State is read and written, gradients are read twice, parameters written."""
    layout = Layout(data=ranks, offload_optimizer=True)
    software = replace(find_preset(trainer).software, parameter_bytes=2, gradient_bytes=2, optimizer_bytes=12)
    step = TrainingStep(layout=layout, seq_len=1024, software=software)
    count = StageParameters(shared=1e9, experts=0.0, widest_layer=0.0)

    found_s = optimizer_seconds(step, count, None, math.inf)

    assert found_s == pytest.approx((2 * 12 + 2 * 2 + 2) * 1e9 / rate)
