"""Products of experts that are launched one by one."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.architecture import Experts
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.expert_launches import waiting_seconds
from memadvisor.cost.layouts.kernels import device_of, matmul_seconds, stream_seconds
from memadvisor.cost.layouts.layer_work import layer_groups, layer_work
from memadvisor.cost.layouts.links import group_of
from memadvisor.hardware.load import load_hardware
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.read import read_rows
from memadvisor.lora import Lora
from memadvisor.software_traits import Software
from tests.cost.layouts.nodes import make_cluster
from tests.planning.small_spaces import make_model

MODEL = make_model(2, Experts(num_experts=64, experts_per_token=2, expert_ffn=256))


def waiting(tokens, dtype="bfloat16", expert=4, **software):
    step = TrainingStep(
        layout=Layout(data=expert, expert=expert),
        seq_len=512,
        software=Software(launches_each_expert=True, **software),
    )
    device = device_of(load_hardware("H100-SXM-80GB"), dtype, FITTED)
    return waiting_seconds(MODEL, step, 1, tokens, device), device


def done(device, tokens):
    rows = tokens * 2 / 16
    return matmul_seconds(device, rows, 512, 1024, 16) + matmul_seconds(device, rows, 1024, 256, 16)


def test_the_host_launches_two_products_of_each_expert_and_twice_as_many_back():
    (forward, backward), device = waiting(16)
    assert forward == pytest.approx(16 * 2 * 10e-6 - done(device, 16))
    assert backward == pytest.approx(16 * 4 * 10e-6 - 2 * done(device, 16))


def test_what_comes_into_them_is_cast_where_operands_are_narrow():
    (forward, backward), device = waiting(16, "float8_e4m3fn")
    assert forward == pytest.approx(16 * 4 * 10e-6 - done(device, 16))
    assert backward == pytest.approx(16 * 6 * 10e-6 - 2 * done(device, 16))


def test_long_products_hide_their_launches():
    assert waiting(10**6)[0] == (0.0, 0.0)


def test_graphs_of_attention_and_router_leave_experts_out():
    assert waiting(16, launch_share=0.5)[0] == waiting(16)[0]
    assert waiting(16, launch_share=0.0)[0] == (0.0, 0.0)


def looped(lora=None, expert=4):
    software = Software(loops_experts=True, lora=lora)
    step = TrainingStep(layout=Layout(data=expert, expert=expert), seq_len=512, software=software)
    device = waiting(16)[1]
    return waiting_seconds(MODEL, step, 1, 16, device), device


def test_a_loop_over_stacked_experts_makes_a_gradient_of_the_stack_for_each():
    (forward, backward), device = looped()
    stack = MODEL.expert_layer_parameters(1) / 4
    assert forward == pytest.approx(16 * 14 * 10e-6)
    assert backward == pytest.approx(16 * 28 * 10e-6 + stream_seconds(device, 16 * stack * 8.0))
    assert looped(lora=Lora(rank=8))[0][1] == pytest.approx(16 * 28 * 10e-6)


def test_autograd_makes_a_gradient_of_the_whole_stack_for_each_part_that_is_taken():
    """Four parts: four gradients as large as the stack, and three sums of two."""
    stack = torch.randn(4, 3, 5, requires_grad=True)
    result = sum(F.linear(torch.randn(2, 5), stack[i]).sum() for i in range(4))
    with Sizes() as seen:
        result.backward()
    whole = [name for name, size in seen.made if size == stack.numel() and name != "aten.detach.default"]
    assert whole.count("aten.new_zeros.default") + whole.count("aten.select_backward.default") == 4
    assert whole.count("aten.add.Tensor") + whole.count("aten.add_.Tensor") == 3


@pytest.mark.parametrize(
    ("said", "loops"), [("eager", True), ("grouped_mm", False), ("scattermoe", False), ("", False)]
)
def test_a_row_says_how_experts_are_gone_through(said, loops):
    header = ["model", "gpu", "framework", "experts_implementation"]
    (row,) = read_rows([header, ["qwen3-30b-a3b", "H200", "transformers", said]], "t")
    assert row.case.step.software.loops_experts is loops


class Sizes(TorchDispatchMode):
    """Operators, each with the number of elements that it makes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.made.append((str(func), made.numel()))
        return made


def test_grouped_kernels_wait_for_nobody():
    step = TrainingStep(layout=Layout(data=4, expert=4), seq_len=512)
    device = waiting(16)[1]
    assert waiting_seconds(MODEL, step, 1, 16, device) == (0.0, 0.0)
    assert waiting_seconds(replace(MODEL, experts=None), step, 1, 16, device) == (0.0, 0.0)


def test_nobody_waits_for_the_number_of_tokens_where_experts_are_padded():
    cluster = make_cluster(1)
    device = device_of(cluster.accelerator, "bfloat16", FITTED)
    groups = layer_groups(Layout(), lambda size, stride: group_of(cluster, size, stride, FITTED), False)
    read, padded = (
        layer_work(
            MODEL,
            TrainingStep(layout=Layout(), seq_len=2**18, software=Software(pads_experts=pads)),
            1,
            device,
            groups,
        )
        for pads in (False, True)
    )
    assert read.host_s > 0.0 == padded.host_s
    assert read.forward_s + read.backward_s - padded.forward_s - padded.backward_s == pytest.approx(
        read.host_s
    )


def test_how_experts_are_shared_out_is_nothing_to_a_dense_layer():
    model = replace(MODEL, experts=replace(MODEL.experts, first_dense=1))
    cluster = make_cluster(4, inside=1e9)
    device = device_of(cluster.accelerator, "bfloat16", FITTED)

    def dense(expert):
        layout = Layout(data=4, expert=expert)
        groups = layer_groups(layout, lambda size, stride: group_of(cluster, size, stride, FITTED), False)
        return layer_work(model, TrainingStep(layout=layout, seq_len=64), 0, device, groups)

    assert dense(4) == dense(1)


def experts_on_two_tensor_ranks(whole, shared=0):
    """Four ranks of a node with 64 experts: two parts of 32 each, or 16 whole ones."""
    cluster = make_cluster(4, inside=1e9)
    device = device_of(cluster.accelerator, "bfloat16", FITTED)
    model = replace(MODEL, experts=replace(MODEL.experts, shared_ffn=shared))
    layout = Layout(data=2, tensor=2, expert=2, sequence_parallel=True)
    step = TrainingStep(layout=layout, seq_len=1024, software=Software(whole_experts=whole))
    groups = layer_groups(
        layout, lambda size, stride: group_of(cluster, size, stride, FITTED), False, whole_experts=whole
    )
    return layer_work(model, step, 1, device, groups), groups, step


def test_whole_experts_need_no_tokens_of_other_tensor_ranks():
    """Their block neither gathers nor scatters what tensor-parallel ranks have of the stream; tokens are exchanged among all four
    ranks in place of two (Liu et al. 2025, arXiv:2504.14960, section 3)."""
    (parted, two, step), (whole, four, _) = (
        experts_on_two_tensor_ranks(is_whole) for is_whole in (False, True)
    )
    stream = 2.0 * 1024 * MODEL.hidden
    pair = two.tensor.seconds("all_gather", stream) + two.tensor.seconds("reduce_scatter", stream)
    sent = stream / 2
    exchanges = 4 * (four.expert.dispatch_seconds(sent, 2) - two.expert.dispatch_seconds(sent, 2))
    overlap = 1.0 - step.software.tensor_overlap
    assert whole.collective_s - parted.collective_s == pytest.approx(exchanges - 2 * pair * overlap)
    assert (two.expert.size, four.expert.size) == (2, 4)


def test_products_of_whole_experts_are_fewer_and_as_much_work():
    (parted, *_), (whole, _, step) = (experts_on_two_tensor_ranks(is_whole) for is_whole in (False, True))
    assert (step.expert_ranks, step.expert_tensor_ranks) == (4, 1)
    assert whole.matmul_s <= parted.matmul_s
    assert whole.stream_s < parted.stream_s  # tokens that pass are those of two ranks, not of each


def test_experts_that_all_tokens_pass_are_parted_all_the_same():
    (_, groups, _), (gathered, *_) = experts_on_two_tensor_ranks(True), experts_on_two_tensor_ranks(True, 256)
    alone = experts_on_two_tensor_ranks(True)[0]
    stream = 2.0 * 1024 * MODEL.hidden
    pair = groups.tensor.seconds("all_gather", stream) + groups.tensor.seconds("reduce_scatter", stream)
    assert gathered.collective_s - alone.collective_s == pytest.approx(2 * pair)
