"""Low-rank adapters beside frozen matrices: what is trained, kept, moved and computed."""

from dataclasses import replace

import pytest

from memadvisor.architecture import Architecture, Experts
from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.adapters import active_adapter_parameters, adapter_parameters, adapter_work
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.data_parallel import microbatch_traffic, replica_groups, step_traffic
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.flops import model_flops
from memadvisor.cost.layouts.kernels import device_of, matmul_seconds
from memadvisor.cost.layouts.layer_work import layer_groups, layer_work
from memadvisor.cost.layouts.links import group_of
from memadvisor.cost.layouts.memory import StageContents, stage_memory, stage_parameters
from memadvisor.cost.layouts.saved import layer_saved_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import LINEAR, Lora
from memadvisor.software_traits import Software
from tests.cost.layouts.nodes import make_cluster

LLAMA = Architecture(
    name="llama", n_layers=2, hidden=1024, n_heads=8, n_kv_heads=8, head_dim=128, ffn=2816, vocab=32000,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip
WHOLE = StageContents(layers=(0, 1), embeddings=1, heads=1)
MATRICES = 4 * 1024**2 + 3 * 1024 * 2816  # of a layer
ENDS = 32000 * 1024
NORMS = 2 * 1024
# Rank 8 beside queries and values: two of 8 (1024 + 1024).
ADAPTERS = 2 * 8 * 2048


def step(lora=None, layout=None, **software):
    software = Software(lora=Lora(**lora) if lora else None, **software)
    return TrainingStep(layout=layout or Layout(), seq_len=512, software=software)


@pytest.mark.parametrize(
    ("model", "rank", "targets", "published"),
    [
        # LitGPT, tutorials/resource-tables.md
        ("llama2-7b", 8, ("query", "value"), 4_194_304),
        ("llama2-13b", 8, ("query", "value"), 6_553_600),
        # ms-swift, docs/source_en/LLM/Benchmark.md: 4.19 M and 17.89 M
        ("qwen-7b", 8, ("qkv",), 4_194_304),
        ("qwen-7b", 8, ("qkv", "output", "gate", "up", "down"), 17_891_328),
    ],
)
def test_published_numbers_of_trained_parameters(model, rank, targets, published):
    assert active_adapter_parameters(load_architecture(model), Lora(rank=rank, targets=targets)) == published


def test_each_expert_has_its_own_and_a_token_meets_those_it_passes():
    model = replace(LLAMA, experts=Experts(num_experts=4, experts_per_token=2, expert_ffn=512))
    lora = Lora(rank=8, targets=("query", "down"))
    assert adapter_parameters(model, lora, 0, 1) == (8 * 2048, 4 * 8 * (512 + 1024))
    assert active_adapter_parameters(model, lora) == 2 * (8 * 2048 + 2 * 8 * (512 + 1024))


def test_tensor_parallelism_parts_one_side():
    """Columns of queries, and depth of the output projection: the other side is whole on each rank."""
    for target in ("query", "output"):
        assert adapter_parameters(LLAMA, Lora(rank=8, targets=(target,)), 0, 4) == (8 * (1024 + 256), 0)


def held(lora, layout=None, **software):
    return stage_memory(LLAMA, step(lora, layout, **software), WHOLE, 0.0, FITTED)


def test_only_adapters_have_gradients_and_state():
    found = held({"rank": 8, "targets": ("query", "value")})
    frozen = 2 * (MATRICES + NORMS) + 2 * ENDS
    assert found.parameter_bytes == pytest.approx(2 * (frozen + 2 * ADAPTERS))
    assert found.gradient_bytes == 4 * 2 * ADAPTERS
    assert found.optimizer_bytes == 12 * 2 * ADAPTERS


def test_a_quantised_base_is_of_the_layers_alone():
    """Embedding and head have 16 bits, or 32 where they are widened."""
    for widened, end_bytes in ((False, 2), (True, 4)):
        found = held({"rank": 8, "targets": ("query", "value"), "base": "nf4", "widened": widened})
        layers = 2 * (MATRICES + NORMS)
        assert found.parameter_bytes == pytest.approx(
            0.5625 * layers + end_bytes * 2 * ENDS + 2 * 2 * ADAPTERS
        )


def test_ends_are_trained_as_copies():
    """Beside adapters in fp32 they keep the base's dtype, with gradients and moments in it: 2 + 2 + 4 bytes beside the frozen two."""
    software = {"parameter_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
    without, with_ends = (
        held({"rank": 8, "targets": ("query", "value"), "trains_ends": trained}, **software)
        for trained in (False, True)
    )
    assert with_ends.states_bytes - without.states_bytes == pytest.approx(8 * 2 * ENDS)


def test_zero_3_shares_the_frozen_parameters_too():
    lora = {"rank": 8, "targets": ("query", "value")}
    one, four = held(lora), held(lora, Layout(data=4, zero_stage=3))
    assert four.parameter_bytes == pytest.approx(one.parameter_bytes / 4)
    assert four.optimizer_bytes == pytest.approx(one.optimizer_bytes / 4)
    # Two layers gathered in 16 bits, and the gradients of one layer's adapters.
    working = held(lora).buffer_bytes
    assert four.buffer_bytes - working == pytest.approx(2 * 2 * (MATRICES + NORMS) + 4 * ADAPTERS)


def test_frozen_products_keep_no_inputs():
    """Norms' results (2 of 1024) and the activation's (2816) are kept for gradients of matrices alone; queries' and values'
    adapters keep the one and their 8 columns each."""
    trained, frozen = (
        layer_saved_bytes(LLAMA, step(lora), 0) / 512
        for lora in (None, {"rank": 8, "targets": ("query", "value")})
    )
    assert trained - frozen == 2 * (1024 + 1024 + 2816) - 2 * 1024 - 2 * 2 * 8


def test_behind_dropout_each_adapter_has_an_input_and_a_mask():
    lora = {"rank": 8, "targets": ("query", "value")}
    plain, dropped = (layer_saved_bytes(LLAMA, step(lora | {"dropout": on}), 0) / 512 for on in (False, True))
    assert dropped - plain == 2 * 3 * 1024 - 2 * 1024


def test_products_of_bitsandbytes_keep_their_inputs():
    lora = {"rank": 8, "targets": ("query", "value"), "base": "nf4"}
    without, kept = (
        layer_saved_bytes(LLAMA, step(lora | {"keeps_inputs": on}), 0) / 512 for on in (False, True)
    )
    assert kept - without == 2 * (1024 + 1024 + 2816) - 2 * 1024


def works(lora, **software):
    cluster = make_cluster(1)
    device = device_of(cluster.accelerator, "bfloat16", FITTED)
    groups = layer_groups(Layout(), lambda size, stride: group_of(cluster, size, stride, FITTED), False)
    return layer_work(LLAMA, step(lora, **software), 0, device, groups), device


def test_a_frozen_matrix_has_one_product_in_the_backward():
    full, device = works(None)
    lora, _ = works({"rank": 8, "targets": ("query",)})
    adapter = matmul_seconds(device, 512, 8, 1024) + matmul_seconds(device, 512, 1024, 8)
    assert lora.matmul_s == pytest.approx(full.matmul_s * 2 / 3 + 3 * adapter)
    assert lora.weight_s < full.weight_s


def test_quantised_matrices_are_made_wide_in_both_directions():
    """NF4 is read and written as 16 bits, forward and backward; GPTQ's go through separate operators."""
    plain, device = works({"rank": 8, "targets": ("query",)})
    for base, moved in (("nf4", 0.5625 + 2), ("int4", 16.5)):
        wide, _ = works({"rank": 8, "targets": ("query",), "base": base})
        launches = 3 * 2 * 7 * FITTED.kernel_s  # two for each of seven matrices, twice as much backward
        once_s = MATRICES * moved / (device.memory_bandwidth_bytes_per_s * FITTED.bandwidth_share)
        assert wide.stream_s - plain.stream_s == pytest.approx(2 * once_s + launches)


def test_an_adapter_s_sum_is_of_results_forward_and_of_inputs_gradients_back():
    """6 bytes of an element each; in fp32 12 more of an input's for casts either way."""
    for size, cast in ((2, 0), (4, 12)):
        step_of = step({"rank": 8, "targets": ("down",)}, parameter_bytes=size)
        work = adapter_work(LLAMA, step_of, 0, 512)
        assert work.stream_bytes == 512 * (2816 * cast + 1024 * 6)
        assert work.backward_bytes == 512 * 2816 * (cast + 6)


def test_model_flops_are_the_forward_and_once_as_much_of_frozen_products():
    """4 N of a token for 6 N, attention aside; 6 of an adapter's parameter."""
    short = replace(step(), seq_len=1)
    lora = replace(step({"rank": 8, "targets": ("query", "value")}), seq_len=1)
    products = 2 * MATRICES + 2 * NORMS + 1024 + ENDS
    attention = 12 * 2 * 1024
    assert model_flops(LLAMA, short) == pytest.approx(6 * products + attention)
    assert model_flops(LLAMA, lora) == pytest.approx(4 * products + attention + 6 * 2 * ADAPTERS)


def test_replicas_reduce_adapters_and_gather_the_base():
    cluster = make_cluster(16)

    def group(size, stride):
        return group_of(cluster, size, stride, FITTED)

    layout = Layout(data=16, zero_stage=3)
    found = {}
    for name, lora in (("all", None), ("lora", {"rank": 8}), ("nf4", {"rank": 8, "base": "nf4"})):
        one = step(lora, layout)
        count = stage_parameters(LLAMA, one, WHOLE)
        found[name] = microbatch_traffic(one, count, replica_groups(layout, group, None))
    assert found["lora"][0] == found["all"][0]
    assert found["lora"][1] < 0.7 * found["all"][1]
    assert found["nf4"][0] < found["lora"][0]
    plain = Layout(data=16)
    reduced = [
        step_traffic(one, stage_parameters(LLAMA, one, WHOLE), replica_groups(plain, group, None))[0]
        for one in (step(None, plain), step({"rank": 8}, plain))
    ]
    assert reduced[1] < 0.2 * reduced[0]


def test_the_whole_step_is_smaller_and_faster():
    full, lora = (
        estimate_step(LLAMA, step(lora), make_cluster(1)) for lora in (None, {"rank": 8, "targets": LINEAR})
    )
    assert lora.worst.allocated_bytes < full.worst.allocated_bytes
    assert lora.step_time_s < full.step_time_s
    assert sum(lora.time_s.values()) == pytest.approx(lora.step_time_s)


@pytest.mark.parametrize("fused_attention", [False, True])
@pytest.mark.parametrize(
    "experts", [None, Experts(num_experts=4, experts_per_token=2, expert_ffn=512, shared_ffn=256)]
)
def test_computing_norms_and_gates_again_keeps_no_more_beside_frozen_matrices(experts, fused_attention):
    """What of a frozen layer nobody asks for is neither kept nor computed again."""
    model = replace(LLAMA, experts=experts)
    none, again = (
        layer_saved_bytes(
            model,
            step({"rank": 8}, Layout(micro_batch_size=4, recompute=how), fused_attention=fused_attention),
            0,
        )
        for how in ("none", "pointwise")
    )
    assert again <= none
