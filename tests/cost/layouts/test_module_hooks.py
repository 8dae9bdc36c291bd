"""What hooks around modules take the host under ZeRO stage 3."""

from dataclasses import replace

import pytest

from memadvisor.architecture import Experts
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import layer_groups, layer_work
from memadvisor.cost.layouts.links import group_of
from memadvisor.cost.layouts.module_hooks import hooked_modules, hooks_seconds
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import Lora
from memadvisor.software import DEEPSPEED
from memadvisor.software_traits import Software
from tests.cost.layouts.nodes import make_cluster
from tests.planning.small_spaces import make_model

MODEL = replace(make_model(2, None), gated_mlp=True)


def step(zero_stage=3, expert=1, **software):
    layout = Layout(data=8, zero_stage=zero_stage, expert=expert)
    return TrainingStep(layout=layout, seq_len=16, software=Software(module_hook_s=1e-3, **software))


def test_matrices_norms_and_adapters_are_modules():
    assert hooked_modules(MODEL, step(), 0) == 2 + 4 + 3
    lora = Lora(rank=8, targets=("query", "value"))
    assert hooked_modules(MODEL, step(lora=lora), 0) == 2 + 4 + 3 + 2 * 2


def test_each_expert_of_a_rank_is_a_module_of_its_own():
    experts = replace(MODEL, experts=Experts(num_experts=64, experts_per_token=2, expert_ffn=256))
    assert hooked_modules(experts, step(), 1) == 2 + 4 + 3 * 64
    assert hooked_modules(experts, step(expert=8), 1) == 2 + 4 + 3 * 8


def test_only_sharded_parameters_are_fetched():
    assert hooks_seconds(MODEL, step(), 0) == pytest.approx(9e-3)
    assert hooks_seconds(MODEL, step(zero_stage=2), 0) == 0.0
    assert Software().module_hook_s == 0.0 < DEEPSPEED.software.module_hook_s


def test_they_are_waited_for_where_a_pass_is_shorter():
    cluster = make_cluster(1)
    device = device_of(cluster.accelerator, "bfloat16", FITTED)
    groups = layer_groups(Layout(), lambda size, stride: group_of(cluster, size, stride, FITTED), False)
    gathered, sharded = (layer_work(MODEL, step(stage), 0, device, groups) for stage in (2, 3))
    assert sharded.forward_s - gathered.forward_s == pytest.approx(9e-3)
    assert sharded.backward_s - gathered.backward_s == pytest.approx(9e-3)
