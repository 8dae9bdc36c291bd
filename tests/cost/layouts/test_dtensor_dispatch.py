"""What the host takes of operators on DTensors, under torch's own tensor parallelism."""

from dataclasses import replace

import pytest

from memadvisor.architecture import Experts
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.dtensor_dispatch import dtensor_seconds
from memadvisor.cost.layouts.kernels import device_of
from memadvisor.cost.layouts.layer_work import layer_groups, layer_work
from memadvisor.cost.layouts.links import group_of
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.read import read_rows
from memadvisor.software import MEGATRON_CORE
from memadvisor.software_torch import FSDP
from tests.cost.layouts.nodes import make_cluster
from tests.planning.small_spaces import make_model

MODEL = make_model(2)


def step_of(tensor=4, software=FSDP.software, sequence_parallel=False):
    layout = Layout(tensor=tensor, sequence_parallel=sequence_parallel)
    return TrainingStep(layout=layout, seq_len=64, software=software)


def seconds(model=MODEL, **layout):
    return dtensor_seconds(model, step_of(**layout), 1)


def test_each_matrix_is_dispatched_and_with_sequence_parallelism_each_norm():
    forward, backward = seconds()
    matrices = 7 if MODEL.gated_mlp else 6
    assert forward == pytest.approx(matrices * 0.57e-3)
    assert backward == pytest.approx(matrices * 0.82e-3)
    with_norms = seconds(sequence_parallel=True)
    assert with_norms[0] - forward == pytest.approx(2 * 0.6e-3)
    normed_heads = seconds(replace(MODEL, qk_norm=True), sequence_parallel=True)
    assert normed_heads[0] - with_norms[0] == pytest.approx(2 * 0.6e-3)


def test_neither_one_rank_nor_megatrons_layers_have_dtensors():
    assert seconds(tensor=1) == (0.0, 0.0)
    assert seconds(software=MEGATRON_CORE.software) == (0.0, 0.0)


def test_grouped_experts_are_plain_tensors():
    few, many = (
        seconds(replace(MODEL, experts=Experts(num_experts=number, experts_per_token=2, expert_ffn=64)))
        for number in (4, 64)
    )
    assert few == many < seconds()


def test_the_device_waits_for_them_where_products_are_short():
    cluster = make_cluster(4)
    device = device_of(cluster.accelerator, "bfloat16", FITTED)

    def work(seq_len, dtensors):
        step = replace(step_of(software=replace(FSDP.software, dtensors=dtensors)), seq_len=seq_len)
        groups = layer_groups(
            step.layout, lambda size, stride: group_of(cluster, size, stride, FITTED), False
        )
        return layer_work(MODEL, step, 1, device, groups)

    short = work(64, True).forward_s - work(64, False).forward_s
    assert short == pytest.approx(dtensor_seconds(MODEL, step_of(), 1)[0])
    assert work(2**20, True).forward_s == work(2**20, False).forward_s


@pytest.mark.parametrize(("compiled", "dispatched"), [("false", True), ("true", False)])
def test_compiled_layers_had_it_when_they_were_traced(compiled, dispatched):
    header = ["model", "gpu", "n_gpus", "tp", "framework", "compile"]
    (row,) = read_rows([header, ["llama3-8b", "H100", "8", "8", "torchtitan", compiled]], "t")
    assert row.case.step.software.dtensors is dispatched
