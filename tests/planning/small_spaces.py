"""Questions whose spaces are small enough to be walked through."""

from dataclasses import replace

from hypothesis import strategies as st

from memadvisor.architecture import Architecture, Experts, VisionTower
from memadvisor.hardware.cluster import Cluster, Link
from memadvisor.hardware.hardware import Hardware
from memadvisor.lora import Lora
from memadvisor.planning.layout_space import LayoutQuestion
from memadvisor.recurrence import Recurrence
from memadvisor.software_traits import Software


def make_model(n_layers=4, experts=None, tied=True, pattern=""):
    """`pattern`: with recurrences in some layers."""
    mixer = Recurrence(kind="mamba2", n_heads=32, head_dim=64, state_dim=64, norm=2048) if pattern else None
    return Architecture(
        name="small", n_layers=n_layers, hidden=1024, n_heads=8, n_kv_heads=4, head_dim=128, ffn=4096,
        vocab=32000, tied_embeddings=tied, gated_mlp=True, experts=experts, layer_pattern=pattern, recurrence=mixer,
    )  # fmt: skip


def make_tower(is_trained):
    """Of images before the model, one in each sequence."""
    stack = Architecture(
        name="tower", n_layers=6, hidden=512, n_heads=8, n_kv_heads=8, head_dim=64, ffn=2048, vocab=0,
        tied_embeddings=True, gated_mlp=False, biases=True, norm_vectors=2, causal=False, final_norm=False,
    )  # fmt: skip
    return VisionTower(
        stack=stack, around=2_000_000, merged=4, image_tokens=64, images=1, is_trained=is_trained
    )


def make_cluster(per_node=4, num_nodes=1, memory_bytes=16e9, across=25e9, host=True):
    accelerator = Hardware(
        name="device", kind="given", source="", memory_bytes=int(memory_bytes),
        memory_bandwidth_bytes_per_s=2e12, peak_flops_per_s={"bfloat16": 300e12},
    )  # fmt: skip

    def link(bytes_per_s):
        return Link(kind="link", bytes_per_s=bytes_per_s, alpha_s=5e-6, source="")

    return Cluster(
        accelerator=accelerator, num_nodes=num_nodes, per_node=per_node, inside=link(200e9) if per_node > 1 else None,
        across=link(across) if num_nodes > 1 else None, host=link(25e9) if host else None,
    )  # fmt: skip


# All of ZeRO++ on two nodes of two accelerators, with experts.
ZEROPP = LayoutQuestion(
    model=make_model(3, Experts(num_experts=4, experts_per_token=2, expert_ffn=2048, first_dense=1)),
    cluster=make_cluster(2, 2, across=1e9, host=False), seq_len=512, batch_sequences=4, schedules=("1f1b", "zb-h1"),
    recompute=("none",), zeropp=("hpz", "qwz", "qgz"),
)  # fmt: skip

# Adapters beside quantised experts and attention, with copies of the ends.
LORA = LayoutQuestion(
    model=make_model(3, Experts(num_experts=4, experts_per_token=2, expert_ffn=2048, first_dense=1)),
    cluster=make_cluster(2, 2, across=1e9), seq_len=512, batch_sequences=4, schedules=("1f1b", "zb-h1"),
    recompute=("none", "full"), offload=True,
    software=Software(parameter_bytes=4, lora=Lora(rank=64, base="nf4", trains_ends=True)),
)  # fmt: skip

# Fewer microbatches than stages, also with two chunks to a stage, and hosts that messages hold up.
STARVED = LayoutQuestion(
    model=make_model(8), cluster=make_cluster(4, 2, across=1e9), seq_len=256, batch_sequences=4,
    schedules=("1f1b", "gpipe", "breadth-first"), recompute=("none",),
    software=Software(stalled_message_s=0.02, stalling_node_chance=0.6),
)  # fmt: skip


@st.composite
def questions(draw):
    """Up to four accelerators, with all that the space distinguishes."""
    per_node, num_nodes = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)]))
    experts = draw(
        st.sampled_from(
            [
                None,
                None,
                Experts(num_experts=4, experts_per_token=2, expert_ffn=2048, first_dense=1),
                Experts(num_experts=4, experts_per_token=2, expert_ffn=2048, first_dense=1, every=2),
            ]
        )
    )
    schedules = draw(
        st.sampled_from([("1f1b", "interleaved"), ("gpipe", "breadth-first"), ("1f1b", "zb-h1", "zb-v")])
    )
    model = make_model(
        draw(st.sampled_from([3, 4])),
        experts,
        draw(st.booleans()),
        draw(st.sampled_from(["", "", "ra", "RFA"])),
    )
    tower = draw(st.sampled_from([None, None, make_tower(False), make_tower(True)]))
    return LayoutQuestion(
        model=replace(model, tower=tower),
        cluster=make_cluster(
            per_node, num_nodes, draw(st.sampled_from([8e9, 12e9, 24e9])), draw(st.sampled_from([1e9, 50e9]))
        ),
        seq_len=draw(st.sampled_from([512, 2048])),
        batch_sequences=draw(st.sampled_from([4, 6])),
        software=Software(
            fused_attention=draw(st.booleans()),
            overlap_reduce=draw(st.booleans()),
            selective=draw(st.sampled_from(["scores", "operators"])),
            stalled_message_s=draw(st.sampled_from([0.0, 0.0, 0.02])),
            stalling_node_chance=0.6,
        ),
        schedules=schedules,
        recompute=draw(st.sampled_from([("none", "full"), ("none", "selective", "pointwise")])),
        offload=draw(st.booleans()),
        zeropp=draw(st.sampled_from([(), (), (), ("hpz", "qgz")])),
    )
