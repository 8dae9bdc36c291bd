"""A tower of images before a language model: what it holds, trained and frozen, and what images take."""

from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.flops import model_flops
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import layer_groups
from memadvisor.cost.layouts.links import group_of
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.cost.layouts.vision_work import tower_saved_bytes, tower_step, tower_work
from memadvisor.errors import UsageError
from memadvisor.hardware.load import load_hardware
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import Lora
from memadvisor.software_traits import Software
from tests.cost.layouts.nodes import make_cluster

MODEL = load_architecture("llava-1.5-7b")
TOWER = MODEL.tower


def make_step(software=None, **layout):
    return TrainingStep(layout=Layout(**layout), seq_len=2048, software=software or Software())


def with_tower(**changes):
    return replace(MODEL, tower=replace(TOWER, **changes))


def estimate(model, machines=None, **layout):
    return estimate_step(model, make_step(**layout), machines or make_cluster(ranks=8))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_tower_has_its_parameters_and_nothing_else(stage):
    """Of 8 ranks; the model without it has none of them."""
    trained, frozen, bare = (
        estimate(model, data=8, zero_stage=stage).worst
        for model in (MODEL, with_tower(is_trained=False), replace(MODEL, tower=None))
    )
    size = TOWER.num_parameters()
    parameters, gradients, optimizer = (size / (8 if stage >= least else 1) for least in (3, 2, 1))

    assert frozen.parameter_bytes - bare.parameter_bytes == pytest.approx(2 * parameters)
    assert (frozen.gradient_bytes, frozen.optimizer_bytes) == pytest.approx(
        (bare.gradient_bytes, bare.optimizer_bytes)
    )
    assert trained.gradient_bytes - bare.gradient_bytes == pytest.approx(4 * gradients)
    assert trained.optimizer_bytes - bare.optimizer_bytes == pytest.approx(12 * optimizer)


def test_a_tower_is_on_the_first_stage_alone():
    found, bare = (
        estimate(model, pipeline=4, num_microbatches=8, data=2)
        for model in (MODEL, replace(MODEL, tower=None))
    )

    assert found.first.parameter_bytes - bare.first.parameter_bytes == pytest.approx(
        2 * TOWER.num_parameters()
    )
    assert found.last == bare.last


def test_without_images_a_tower_takes_no_time_of_forwards_and_backwards():
    found, bare = (
        estimate(model, data=8).pipeline
        for model in (with_tower(is_trained=False), replace(MODEL, tower=None))
    )
    assert found.step_s == bare.step_s


def test_two_images_take_twice_the_flops_and_the_memory_of_one():
    one, two, none = (with_tower(images=count) for count in (1, 2, 0))
    step = make_step(data=8)

    assert tower_saved_bytes(two, step) == 2 * tower_saved_bytes(one, step) > 0
    assert model_flops(two, step) - model_flops(none, step) == pytest.approx(
        2 * (model_flops(one, step) - model_flops(none, step))
    )
    # 24 layers of an encoder of 576 patches and the projector's two matrices, three products each of which the backward
    # does two.
    layers = 24 * (4 * 1024**2 + 2 * 1024 * 4096) * 576 + 24 * 2 * 576**2 * 1024 + (1024 + 4096) * 4096 * 576
    counted = (model_flops(one, step) - model_flops(none, step)) / 8
    assert counted == pytest.approx(6 * layers, rel=0.01)


def test_a_towers_layers_keep_what_an_encoders_layers_keep():
    model, step = with_tower(images=3), make_step(data=8, micro_batch_size=2)
    own = tower_step(model.tower, step)

    assert own.microbatch_tokens == 2 * 3 * 576
    assert tower_saved_bytes(model, step) == pytest.approx(
        24 * layer_saved_bytes(TOWER.stack, own, 0), rel=0.02
    )


def test_a_frozen_tower_keeps_nothing_and_runs_forward_alone():
    machine, step = (
        device_of(load_hardware("H100-SXM-80GB"), "bfloat16", FITTED),
        make_step(micro_batch_size=8),
    )
    groups = layer_groups(
        step.layout, lambda size, stride: group_of(make_cluster(ranks=1), size, stride, FITTED), False
    )
    trained, frozen = (
        tower_work(with_tower(images=4, is_trained=on), step, machine, groups) for on in (True, False)
    )
    assert tower_saved_bytes(with_tower(images=4, is_trained=False), step) == 0
    assert frozen.forward_s == pytest.approx(trained.forward_s)
    assert frozen.backward_s == frozen.weight_s == 0
    for work in (trained, frozen):
        parts = work.matmul_s + work.attention_s + work.stream_s + work.collective_s + work.host_s
        assert work.forward_s + work.backward_s == pytest.approx(parts)


@pytest.mark.parametrize("trained", [True, False])
def test_the_parts_sum_to_the_step(trained):
    found = estimate(with_tower(images=2, is_trained=trained), data=4, tensor=2, num_microbatches=2)

    assert sum(found.time_s.values()) == pytest.approx(found.step_time_s, rel=1e-9)
    assert all(seconds >= -1e-12 for seconds in found.time_s.values())


def test_adapters_leave_the_tower_alone():
    lora = Software(parameter_bytes=4, lora=Lora(rank=8, trains_ends=True))
    found, bare = (
        estimate_step(model, make_step(lora, data=8), make_cluster(ranks=8)).worst
        for model in (with_tower(is_trained=False), replace(MODEL, tower=None))
    )
    assert found.optimizer_bytes == bare.optimizer_bytes
    assert found.parameter_bytes - bare.parameter_bytes == pytest.approx(2 * TOWER.num_parameters())


def test_context_parallel_images_are_refused():
    with pytest.raises(UsageError, match="images is not modelled"):
        estimate(with_tower(images=1), data=4, context=2)
