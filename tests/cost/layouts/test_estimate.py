from dataclasses import replace

import pytest

from memadvisor.architecture import Architecture, Experts
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Link
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_traits import Software
from tests.cost.layouts.nodes import make_cluster

LLAMA = Architecture(
    name="llama", n_layers=32, hidden=4096, n_heads=32, n_kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip


def estimate(machines=None, seq_len=4096, software=None, **layout):
    step = TrainingStep(layout=Layout(**layout), seq_len=seq_len, software=software or Software())
    return estimate_step(LLAMA, step, machines or make_cluster())


LAYOUTS = [
    {"data": 16, "zero_stage": 1, "num_microbatches": 4},
    {"data": 16, "zero_stage": 3, "num_microbatches": 2},
    {"data": 2, "tensor": 8, "sequence_parallel": True, "num_microbatches": 8},
    {"data": 2, "tensor": 2, "pipeline": 4, "num_microbatches": 8},
    {"data": 2, "context": 8, "zero_stage": 1},
    {"data": 4, "pipeline": 4, "num_microbatches": 8, "recompute": "full"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_parts_sum_to_the_step(layout):
    predicted = estimate(**layout)
    assert sum(predicted.time_s.values()) == pytest.approx(predicted.step_time_s, rel=1e-9)
    assert all(seconds >= -1e-12 for seconds in predicted.time_s.values())
    assert sum(predicted.stage_layers) == LLAMA.n_layers
    assert 0 < predicted.mfu <= predicted.hfu < 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_faster_links_never_make_a_step_slower(layout):
    assert (
        estimate(make_cluster(inside=900e9, across=100e9), **layout).step_time_s
        <= estimate(**layout).step_time_s
    )


def test_a_step_waits_for_activations_on_their_way_to_the_host_and_back():
    """What a microbatch keeps leaves under its forward and comes back under its backward; inputs alone take less than either."""

    def machines(bytes_per_s):
        return replace(
            make_cluster(), host=Link(kind="pcie", bytes_per_s=bytes_per_s, alpha_s=0.0, source="")
        )

    kept = {"data": 16, "num_microbatches": 4}
    slow, fast = machines(1e9), machines(64e9)
    here, there = (estimate(slow, **kept, offload_activations=share).time_s for share in (0.0, 1.0))
    moved_s = 4 * 2 * estimate(slow, **kept).worst.activation_bytes / 1e9

    assert there["host"] > here["host"] == 0
    parts = ("matmul", "attention", "memory_bound", "recompute", "tensor_context_expert_collectives", "host")
    assert sum(there[part] for part in parts) == pytest.approx(moved_s, rel=0.01)
    inputs = {**kept, "recompute": "full"}
    assert estimate(fast, **inputs, offload_activations=1.0).time_s == estimate(fast, **inputs).time_s


def test_zero_shards_states_among_the_replicas():
    plain, one, two, three = (estimate(data=16, zero_stage=stage).worst for stage in range(4))
    parameters = LLAMA.num_parameters()
    assert plain.optimizer_bytes == pytest.approx(12 * parameters, rel=1e-6)  # the last norm is left out
    assert one.optimizer_bytes == plain.optimizer_bytes / 16
    assert two.gradient_bytes == one.gradient_bytes / 16 == plain.gradient_bytes / 16
    assert three.parameter_bytes == two.parameter_bytes / 16 == plain.parameter_bytes / 16


def test_full_recomputation_takes_time_and_saves_memory():
    plain, again = (estimate(data=16, zero_stage=3, recompute=how) for how in ("none", "full"))
    assert again.step_time_s > plain.step_time_s
    assert again.peak_memory_bytes < plain.peak_memory_bytes
    assert again.mfu < again.hfu


def test_the_chance_of_running_out_grows_with_the_batch():
    chances = [estimate(data=16, zero_stage=3, micro_batch_size=size).p_oom for size in (1, 2, 4, 8, 16)]
    assert chances == sorted(chances)
    assert chances[0] < 0.01 and chances[-1] > 0.99


@pytest.mark.parametrize("tensor, further_nodes", [(8, 0), (16, 1)])
def test_collectives_over_nodes_take_what_the_software_adds_for_each_further_one(tensor, further_nodes):
    """Four collectives in a layer's forward, four in its backward, of each microbatch."""
    layout = {"data": 16 // tensor, "tensor": tensor, "sequence_parallel": True, "num_microbatches": 4}
    quick, slow = (estimate(software=Software(far_call_s=far_s), **layout) for far_s in (0.0, 1e-3))
    added_s = 8 * 4 * LLAMA.n_layers * further_nodes * 1e-3
    assert slow.pipeline.step_s - quick.pipeline.step_s == pytest.approx(added_s)


@pytest.mark.parametrize("chance, is_longer", [(0.4, True), (0.2, False)])
def test_messages_hold_up_their_hosts_where_one_of_the_nodes_likely_does(chance, is_longer):
    """Of two nodes: 1 - 0.6^2 is more than a half, 1 - 0.8^2 less. A stage between two others has four messages of a
    microbatch, before and after which first and last ones travel."""
    layout = {"data": 4, "pipeline": 4, "num_microbatches": 16}
    plain, held_up = (
        estimate(software=Software(stalled_message_s=stall_s, stalling_node_chance=chance), **layout)
        for stall_s in (0.0, 10.0)
    )
    added_s = held_up.step_time_s - plain.step_time_s
    assert (16 * 4 * 10 < added_s < (16 + 3) * 4 * 10) if is_longer else added_s == 0
    assert sum(held_up.time_s.values()) == pytest.approx(held_up.step_time_s)
    assert held_up.time_s["host"] - plain.time_s["host"] == pytest.approx(16 * 4 * 10 if is_longer else 0)


def test_shards_of_single_tensors_take_the_latency_of_each():
    small = [
        estimate(
            software=Software(
                shards_tensors=apart, bucket_bytes=1e15, overlap_gather=False, overlap_reduce=False
            ),
            data=16,
            zero_stage=1,
        ).time_s["gradients_and_parameters"]
        for apart in (False, True)
    ]
    assert small[1] - small[0] == pytest.approx(2 * (6 * LLAMA.n_layers + 2) * FITTED.collective_s)


@pytest.mark.parametrize(
    "layout, words",
    [
        ({"data": 3}, "is 3, and there are 16 accelerators"),
        ({"tensor": 16}, None),
        ({"data": 2, "context": 8, "expert": 2}, "0 experts do not part"),
        ({"pipeline": 16, "chunks": 4}, "32 layers do not fill 64 pipeline stages"),
    ],
)
def test_impossible_layouts_say_why(layout, words):
    if words is None:
        assert estimate(**layout).step_time_s > 0
        return
    with pytest.raises(UsageError, match=words):
        estimate(**layout)


def test_unknown_links_and_rates_are_said_not_guessed():
    lonely = replace(make_cluster(), across=None)
    with pytest.raises(UsageError, match="network between nodes is not known"):
        estimate(lonely, data=16)
    slow = replace(
        make_cluster(), accelerator=replace(make_cluster().accelerator, peak_flops_per_s={"float32": 1e12})
    )
    with pytest.raises(UsageError, match="in bfloat16 is not known"):
        estimate(slow, data=16)


def test_scores_of_unaligned_heads_take_longer():
    """Tensor cores take heads that are a multiple of 8 wide: 108 wide ones are not (head_dim 112 is, and computes more)."""
    narrow, aligned = (
        estimate_step(
            replace(LLAMA, head_dim=width),
            TrainingStep(layout=Layout(data=16), seq_len=4096, software=Software(fused_attention=False)),
            make_cluster(),
        ).time_s["attention"]
        for width in (108, 112)
    )
    assert narrow > 1.3 * aligned


def test_narrow_products_gain_less_than_their_rate():
    """Operands are cast, and attention and the head stay in 16 bits."""
    wide, narrow = (
        estimate(data=16, software=Software(compute_dtype=dtype)).step_time_s
        for dtype in ("bfloat16", "float8_e4m3fn")
    )
    assert wide / 2 < narrow < wide


MIXTURE = replace(LLAMA, experts=Experts(num_experts=64, experts_per_token=8, expert_ffn=2048))


def mixture_seconds(**habits):
    layout = Layout(data=64, expert=64, num_microbatches=4)
    step = TrainingStep(layout=layout, seq_len=4096, software=Software(**habits))
    return estimate_step(MIXTURE, step, make_cluster(64)).time_s


def test_launches_replayed_from_graphs_take_the_host_no_time():
    whole, half, none = (mixture_seconds(launch_share=share)["host"] for share in (1.0, 0.5, 0.0))
    assert whole == pytest.approx(2 * half) and whole > none == 0


def test_exchanges_under_another_microbatch_are_shorter_and_never_free():
    alone, under = (mixture_seconds(expert_overlap=on) for on in (False, True))
    name = "tensor_context_expert_collectives"
    assert 0 < under[name] < alone[name]


def test_experts_in_each_second_layer_cost_half_of_a_dense_model_and_half_of_one_of_experts():
    """On one rank, where every layer's work and memory stand for themselves."""
    experts = Experts(num_experts=8, experts_per_token=2, expert_ffn=4096)
    dense = replace(LLAMA, n_layers=4)
    sparse = replace(dense, experts=experts)
    mixed = replace(dense, experts=replace(experts, first_dense=1, every=2))
    step = TrainingStep(layout=Layout(num_microbatches=4), seq_len=4096)
    machine = make_cluster(ranks=1)
    found = [estimate_step(model, step, machine) for model in (dense, sparse, mixed)]

    for one in (lambda each: each.pipeline.step_s, lambda each: each.worst.activation_bytes, lambda each: each.worst.states_bytes):  # fmt: skip
        whole, all_experts, half = map(one, found)
        assert half == pytest.approx((whole + all_experts) / 2, rel=1e-9)
