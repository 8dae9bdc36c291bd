"""Layouts of a captured model: measured times on the device that ran, scaled by roofline on another one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.cost.layouts.captured import CapturedLayout, captured_times
from memadvisor.cost.layouts.captured_times import target_of
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.hardware.hardware import CollectiveCurve, Hardware
from memadvisor.layout import Layout
from tests.planning.captured_chains import a_chain

LINK = Link(kind="link", bytes_per_s=1e9, alpha_s=1e-5, source="a test")
HERE = Hardware(
    name="this machine",
    kind="measured",
    source="a test",
    memory_bytes=2**30,
    memory_bandwidth_bytes_per_s=1e10,
    peak_flops_per_s={"float32": 1e11},
)


def cluster(accelerator=HERE, per_node=1):
    inside = LINK if per_node > 1 else None
    return Cluster(accelerator=accelerator, num_nodes=1, per_node=per_node, inside=inside, across=None)


def times(model, layout, target, recomputed=(), stages=None):
    chosen = CapturedLayout(
        layout=layout, recomputed=frozenset(recomputed), stage_units=stages or (len(model.units),)
    )
    return captured_times(model, chosen, target)


def test_the_layout_that_ran_takes_what_was_measured():
    model = a_chain(4)
    found = times(model, Layout(micro_batch_size=4), target_of(model, cluster(), None))
    assert found.step_time_s == pytest.approx(4 * 0.03 + 0.004 + 0.001)


def test_a_recomputed_unit_takes_its_forward_again():
    model = a_chain(4)
    target = target_of(model, cluster(), None)
    found = times(model, Layout(micro_batch_size=4, recompute="full"), target, ["unit 0", "unit 2"])
    assert found.time_s["recompute"] == pytest.approx(2 * 0.01)


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_times_go_with_the_samples(size, count):
    model = a_chain(3)
    layout = Layout(micro_batch_size=size, num_microbatches=count)
    found = times(model, layout, target_of(model, cluster(), None))
    assert found.step_time_s == pytest.approx(3 * 0.03 * size * count / 4 + 0.004 + 0.001 * size * count / 4)


def test_a_unit_reaches_the_same_share_of_another_devices_roof():
    """Arithmetic decides on both: ten times the peak is a tenth of the time."""
    faster = replace(
        HERE, name="another", peak_flops_per_s={"float32": 1e12}, memory_bandwidth_bytes_per_s=1e11
    )
    model = a_chain(3)
    found = times(model, Layout(micro_batch_size=4), target_of(model, cluster(faster), HERE))
    assert found.time_s["units"] == pytest.approx(3 * 0.003)
    assert found.time_s["optimizer"] == pytest.approx(0.0004)


def test_a_unit_that_waits_for_memory_gains_nothing_from_arithmetic():
    streaming = replace(HERE, memory_bandwidth_bytes_per_s=1e7)
    faster = replace(streaming, name="another", peak_flops_per_s={"float32": 1e12})
    model = a_chain(3)
    found = times(model, Layout(micro_batch_size=4), target_of(model, cluster(faster), streaming))
    assert found.time_s["units"] == pytest.approx(3 * 0.03)


def test_the_machine_of_the_run_must_be_known_to_scale_from_it():
    with pytest.raises(UsageError, match="'this machine', whose rates are not known"):
        target_of(a_chain(2), parse_cluster("H100"), None)


def test_measured_collectives_stand_for_links():
    """What every rank keeps whole is summed once a step, unit by unit, at the measured pace; half a second each."""
    curves = tuple(
        CollectiveCurve(operation=name, num_ranks=2, sizes_bytes=(1000,), durations_s=(0.5,))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    )
    model = a_chain(2)
    target = target_of(model, cluster(replace(HERE, collectives=curves), per_node=2), None)
    found = times(model, Layout(data=2, micro_batch_size=4), target)
    # 4000 bytes a unit, four times the point that was measured, under 0.04 s of backward.
    slowdown = target.coefficients.overlap_slowdown
    assert found.time_s["gradients_and_parameters"] == pytest.approx(2 * 2.0 + 0.04 * slowdown - 0.04)


def test_sharded_parameters_are_gathered_unit_by_unit():
    """Half a second for each message: two in the forward, four in the backward, which hide its 0.06 s."""
    curves = tuple(
        CollectiveCurve(operation=name, num_ranks=2, sizes_bytes=(10**5,), durations_s=(0.5,))
        for name in ("all_reduce", "all_gather", "reduce_scatter")
    )
    model = a_chain(2)
    target = target_of(model, cluster(replace(HERE, collectives=curves), per_node=2), None)
    found = times(model, Layout(data=2, zero_stage=3, micro_batch_size=4), target)
    slowdown = target.coefficients.overlap_slowdown
    assert found.time_s["sharded_parameters"] == pytest.approx(6 * 0.5 + 0.06 * slowdown - 0.06)


def test_stages_hand_over_what_the_capture_saw_pass():
    """Two stages of two units, one microbatch: no overlap at all, and the message there and back."""
    model = a_chain(4)
    target = target_of(model, cluster(per_node=2), None)
    layout = Layout(pipeline=2, micro_batch_size=4)
    found = times(model, layout, target, stages=(2, 2))
    message_s = 1000 / (1e9 * target.coefficients.inside_share) + target.coefficients.pipeline_message_s
    assert found.pipeline.step_s == pytest.approx(4 * 0.03 + 2 * message_s)
    assert found.time_s["pipeline_bubble"] == pytest.approx(2 * 0.03 + 2 * message_s)


def test_parts_sum_to_the_step():
    model = a_chain(6)
    target = target_of(model, cluster(per_node=4), None)
    layout = Layout(data=2, pipeline=2, zero_stage=3, micro_batch_size=2, num_microbatches=4)
    found = times(model, layout, target, ["unit 1"], (3, 3))
    assert sum(found.time_s.values()) == pytest.approx(found.step_time_s)
