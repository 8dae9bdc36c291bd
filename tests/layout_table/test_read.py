"""A row says what it says, whatever its columns are called; what it leaves out follows from the rest or is documented."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.errors import UsageError
from memadvisor.layout_table.columns import COLUMNS, NAMES, plain
from memadvisor.layout_table.read import read_layout_table, read_rows

GPT = {
    "n_layers": "24",
    "hidden": "2048",
    "n_heads": "16",
    "vocab": "51200",
    "seq_len": "1024",
    "gpu": "A100-80GB",
}


def read_one(**columns):
    named = {**GPT, **columns}
    kept = {name: value for name, value in named.items() if value is not None}
    (row,) = read_rows([list(kept), list(kept.values())], "a test")
    return row


def case_of(**columns):
    row = read_one(**columns)
    assert row.error is None, row.error
    return row.case


def test_a_row_of_the_h100_sweep():
    text = (
        "model,n_layers,hidden,n_heads,n_kv_heads,ffn,vocab,tied_embeddings,n_params,seq_len,nodes,n_gpus,dp,pp,tp,"
        "zero_stage,micro_batch_size,grad_accum,global_batch_seqs,status,gpu_memory_gb,gpu\n"
        "1B,16,2048,32,32,8192,131072,True,1342177280,4096,2,16,2,2,4,1,4,32,256,ok,50.2,H100-80GB-SXM\n"
    )
    (row,) = read_rows(csv.reader(io.StringIO(text)), "a test")
    case = row.case

    assert case.architecture.gated_mlp and case.architecture.num_parameters() == 1_342_244_864
    assert case.step.global_batch_sequences == 256
    assert case.step.layout.num_ranks == case.cluster.num_accelerators == 16
    assert (case.cluster.num_nodes, case.cluster.accelerator.name) == (2, "H100-SXM-80GB")
    assert case.cluster.across.bytes_per_s == 50e9
    assert row.notes == ()


def test_a_row_of_the_fsdp_table():
    text = (
        "section,model,n_layers,d_model,n_heads,vocab_size,num_params,seq_len,n_gpus,gpu,gpu_mem_gb,strategy,zero_equiv,"
        "mp_mode,precision,micro_batch_size,grad_accum,global_batch_seqs,act_ckpt_full,act_cpu_offload\n"
        "A100 40GB with 1600 Gbps node-node interconnect (RoCE),70b,80,8192,64,50368,64862437376,2048,64,a100_40gb,40,"
        "FULL_SHARD,3,PURE,bf16,8,4,2048,True,False\n"
    )
    (row,) = read_rows(csv.reader(io.StringIO(text)), "a test")
    case = row.case

    assert case.architecture.num_parameters() == 64_862_437_376
    assert (case.step.layout.zero_stage, case.step.layout.recompute) == (3, "full")
    assert (case.step.software.name, case.step.software.reduce_bytes) == ("llm-foundry", 2)
    assert case.cluster.accelerator.name == "A100-SXM4-40GB"
    assert case.cluster.across.bytes_per_s == 1600e9 / 8 / 8


def test_a_row_of_the_iteration_times():
    case = case_of(
        vocab=None, n_gpus="16", tp="2", dp="2", pp="4", micro_batch_size="4", global_batch_seqs="32",
        act_ckpt="full (use_checkpoint=true in config/validation)", framework="Megatron-DeepSpeed", schedule="1F1B",
        interconnect="NVLink; 4xHDR IB 800 Gb/s per node",
    )  # fmt: skip

    assert case.architecture.vocab == 50432  # 50257, padded to a multiple of 128 for each of two tensor ranks
    assert case.step.layout.num_microbatches == 4
    assert not case.step.software.overlap_reduce and not case.step.software.fused_attention
    assert case.cluster.across.bytes_per_s == 800e9 / 8 / 8
    assert case.cluster.inside.bytes_per_s == 300e9


def test_a_row_of_the_pipeline_schedules():
    case = case_of(
        gpu=None,
        n_layers="22",
        pp_gpus="8",
        tp="1",
        n_microbatches="24",
        micro_batch_size="6",
        schedule="1F1B-I",
    )

    assert case.step.layout.num_ranks == 8
    assert (case.step.layout.schedule, case.step.layout.chunks) == ("interleaved", 3)


def test_a_row_of_the_offload_table():
    row = read_one(
        model="Llama-65B", n_layers="80", hidden="8192", n_heads="64", ffn="22016", vocab="32004", seq_len="8192", n_gpus="256",
        tp="2", cp="2", pp="8", layers_per_virtual_stage="2", dp="8", ckpt="ours(recompute norm+swiglu act)", offload_alpha="0.3",
        gpu="H800-80GB", micro_batch_size="1", global_batch_seqs="256",
    )  # fmt: skip
    layout = row.case.step.layout

    assert (layout.chunks, layout.schedule, layout.recompute, layout.offload_activations) == (
        5,
        "interleaved",
        "pointwise",
        0.3,
    )
    assert row.case.architecture.num_parameters() == 65_285_726_208
    kwai = read_one(source="https://github.com/kwai/Megatron-Kwai/blob/atc24ae/examples/atc24/README.md").case
    assert (kwai.step.software.name, kwai.step.layout.zero_stage) == ("megatron-kwai", 1)
    assert row.case.cluster.inside.bytes_per_s == 200e9


def test_other_publishers_words():
    case = case_of(
        n_layers=None, hidden=None, n_heads=None, vocab=None, seq_len=None, gpu=None,
        num_layers="32", hidden_size="4096", num_attention_heads="32", num_key_value_heads="8", intermediate_size="14336",
        padded_vocab_size="128256", sequence_length="8192", world_size="64", gpus_per_node="8", accelerator="NVIDIA H100 80GB HBM3",
        tensor_parallel="4", mbs="2", gbs="512", flash_attention="False", recompute_granularity="selective", vpp="2",
        pipeline_parallel="2",
    )  # fmt: skip

    assert case.architecture.gated_mlp and case.architecture.n_kv_heads == 8
    assert case.step.layout.data == 8 and case.step.layout.num_microbatches == 32
    assert (case.step.layout.schedule, case.step.layout.chunks) == ("interleaved", 2)
    assert not case.step.software.fused_attention and case.step.layout.recompute == "selective"


def test_experts():
    case = case_of(
        model="mixtral",
        ffn="14336",
        n_experts="8",
        top_k="2",
        ep="4",
        expert_ffn="7168",
        n_gpus="8",
        gpu="H100",
    )

    assert case.architecture.experts.expert_ffn == 7168
    assert case.step.layout.expert == 4


@pytest.mark.parametrize(
    ("columns", "gated"),
    [
        ({"ffn": "8192"}, False),
        ({"ffn": None}, False),
        ({"ffn": "5632"}, True),
        ({"ffn": "8192", "model": "Llama-x"}, True),
        ({"ffn": "5632", "model": "gpt-x"}, False),
        ({"ffn": "8192", "gated_mlp": "true", "model": "gpt-x"}, True),
        ({"ffn": "8192", "n_params": "1720000000"}, True),
        ({"ffn": "8192", "n_params": "1.32B"}, False),
        ({"ffn": "8192", "params_b": "1.7"}, True),
        ({"ffn": "8192", "model": "1.7B"}, True),
        ({"ffn": None, "model": "1.37B"}, False),
        ({"ffn": "8192", "model": "x-1300M"}, False),
    ],
)
def test_whether_the_mlp_is_gated_follows_from_what_the_row_says(columns, gated):
    assert case_of(**columns).architecture.gated_mlp is gated


def test_the_global_batch_counts_where_accumulation_contradicts_it():
    row = read_one(dp="16", micro_batch_size="1", grad_accum="128", global_batch_seqs="256")

    assert row.case.step.layout.num_microbatches == 16
    assert "contradicts" in row.notes[0]


def test_a_micro_batch_that_nobody_names_is_open():
    assert case_of(dp="4", global_batch_seqs="64").micro_batch_is_open
    assert not case_of(dp="4", global_batch_seqs="64", grad_accum="4").micro_batch_is_open
    assert case_of(dp="4", global_batch_seqs="64", grad_accum="4").step.layout.micro_batch_size == 4


def test_what_a_known_model_has_and_the_row_does_not_say():
    nothing = dict.fromkeys(GPT)
    case = case_of(
        **nothing | {"model": "Meta-Llama-3-8B", "seq_len": "8k", "gpu": "8xH100", "vocab": "128,512"}
    )
    assert (case.architecture.n_kv_heads, case.architecture.ffn, case.architecture.vocab) == (
        8,
        14336,
        128512,
    )
    assert case.step.seq_len == 8192

    same = case_of(**nothing | {"model": "Llama-3-8B", "n_layers": "32", "hidden": "4096", "gpu": "H100"})
    assert same.architecture.vocab == 128256
    other = case_of(**nothing | {"model": "Llama-3-8B", "n_layers": "16", "hidden": "4096", "gpu": "H100"})
    assert (other.architecture.n_layers, other.architecture.gated_mlp) == (16, True)


def test_a_known_model_of_other_depth_is_cut():
    """Benchmarks of a few layers of a model that they name: all else is the model's."""
    nothing = dict.fromkeys(GPT)
    few = {"gpu": "8xH100", "seq_len": "4096"}
    row = read_one(**nothing | few | {"model": "DeepSeek-V3", "num_layers": "4"})
    assert row.case.architecture.n_layers == 4 and row.case.architecture.experts.num_experts == 256
    assert "deepseek-v3 has 61 layers: the same model of 4 is taken" in row.notes
    hybrid = case_of(**nothing | few | {"model": "Qwen3.5-35B-A3B", "num_layers": "8"}).architecture
    assert [hybrid.block_of(layer) for layer in range(8)] == ["r", "r", "r", "a"] * 2
    refused = read_one(**nothing | few | {"model": "T5-3B", "num_layers": "8"})
    assert refused.error.startswith("t5-3b has 48 layers of several kinds")


@pytest.mark.parametrize(("column", "cell", "device", "ranks"), [("NPU", "Ascend 910B", "Ascend-910B3-64GB", 1), ("HPU", "Gaudi2 x8", "Gaudi-2-96GB", 8)])  # fmt: skip
def test_accelerators_in_columns_of_their_kinds(column, cell, device, ranks):
    case = case_of(**{"gpu": None, column: cell, "GC": "Yes"})
    assert case.cluster.accelerator.name == device
    assert (case.step.layout.num_ranks, case.step.layout.recompute) == (ranks, "full")


def test_a_vision_transformer_sees_an_image():
    nothing = dict.fromkeys(GPT)
    row = read_one(**nothing | {"model": "ViT-L/16", "gpu": "A100"})
    assert row.case.step.seq_len == row.case.architecture.positions == 14 * 14 + 1
    assert not row.case.architecture.causal
    assert row.notes[0] == "no seq_len: 197 is taken"


def test_a_size_that_the_catalogue_has_not():
    row = read_one(gpu="A100-64GB")
    assert row.case.cluster.accelerator.memory_bytes == 64 * 10**9 and "64 GB" in row.notes[0]
    assert case_of(gpu="A100", gpu_mem_gb="40").cluster.accelerator.name == "A100-SXM4-40GB"


def test_an_accelerator_that_another_column_names():
    row = read_one(gpu=None, source="a paper (measured, A100-40GB, 8/node RoCE)")
    assert row.case.cluster.accelerator.name == "A100-SXM4-40GB" and "names" in " ".join(row.notes)
    assert case_of(gpu=None, system="DGX A100 40GB").cluster.accelerator.name == "A100-SXM4-40GB"


def test_replicas_as_groups_of_shards():
    layout = case_of(dp_replicate="4", dp_shard="8", strategy="HSDP").step.layout
    assert (layout.data, layout.shard, layout.zero_stage) == (32, 8, 3)
    assert case_of(dp="16", strategy="HYBRID_SHARD").step.layout.shard == 8


def test_a_strategy_that_is_a_trainer_s_name_is_understood():
    row = read_one(strategy="Megatron", gpu="H100")
    assert row.case.step.software.name == "megatron-core" and row.case.step.layout.zero_stage == 1
    assert "not understood" not in " ".join(row.notes)
    assert "not understood" in " ".join(read_one(strategy="magic").notes)


def test_options_of_zeropp():
    row = read_one(dp="16", zero_stage="3", zeropp="hpZ+qwZ")
    layout = row.case.step.layout
    assert (layout.secondary_shard, layout.zeropp) == (8, ("hpz", "qwz")) and "lossy" in " ".join(row.notes)
    given = case_of(dp="16", tp="2", zero_stage="3", zero_hpz_partition_size="2").step.layout
    assert (given.secondary_shard, given.zeropp) == (2, ("hpz",))


@pytest.mark.parametrize(
    ("columns", "software"),
    [
        ({}, {"name": "megatron-2021", "fused_attention": False, "compute_dtype": "float16"}),
        ({"gpu": "H100"}, {"name": "default", "fused_attention": True}),
        ({"framework": "Megatron-LM v2.5"}, {"name": "megatron-2021"}),
        ({"framework": "Megatron-LM", "gpu": "H100"}, {"name": "megatron-core"}),
        ({"source": "https://github.com/NVIDIA/Megatron-LM", "gpu": "H100"}, {"name": "megatron-core"}),
        ({"source": "https://github.com/huggingface/nanotron"}, {"name": "nanotron"}),
        (
            {"framework": "Megatron-Core 0.9", "precision": "FP8-CS", "gpu": "MI300X"},
            {"compute_dtype": "float8_e4m3fnuz"},
        ),
        ({"framework": "PyTorch FSDP2 + TP"}, {"name": "fsdp"}),
        ({"framework": "DeepSpeed", "gpu": "V100"}, {"name": "deepspeed", "compute_dtype": "float16"}),
        ({"strategy": "FSDP"}, {"name": "fsdp"}),
        ({"strategy": "SHARD_GRAD_OP"}, {"name": "fsdp"}),
        ({"strategy": "DDP"}, {"name": "ddp"}),
        ({"strategy": "ZeRO-3"}, {"name": "megatron-deepspeed"}),
        ({"strategy": "ZeRO-3", "gpu": "H100"}, {"name": "deepspeed"}),
        (
            {"framework": "Megatron-DeepSpeed", "gpu": "H100"},
            {"fused_attention": True, "compute_dtype": "bfloat16"},
        ),
        ({"framework": "Megatron-Core", "precision": "fp32", "gpu": "H100"}, {"compute_dtype": "tf32"}),
        ({"framework": "Accelerate + FSDP"}, {"name": "fsdp", "reference_code": True}),
        ({"precision": "pure bf16", "framework": "huggingface"}, {"autocast": False, "optimizer_bytes": 4}),
        ({"strategy": "FULL_SHARD", "compile": "true"}, {"fused_mlp": True}),
        ({"attention": "flash", "dropout": "0.1"}, {"fused_attention": True, "dropout": True}),
        ({"kernel": "flash_attn2 + RMS kern."}, {"fused_attention": True}),
        ({"attention": "fused softmax", "gpu": "H100"}, {"fused_attention": False}),
        ({"dropout": "0.0"}, {"dropout": False}),
        ({"optimizer": "sgd", "gpu": "H100"}, {"optimizer_bytes": 4}),
        ({"mp_mode": "DEFAULT", "precision": "amp_bf16"}, {"reduce_bytes": 4, "compute_dtype": "bfloat16"}),
    ],
)
def test_whose_code_runs(columns, software):
    found = case_of(**columns).step.software
    assert {name: getattr(found, name) for name in software} == software


@pytest.mark.parametrize(
    ("columns", "stage"),
    [({"zero_stage": "ZeRO-2"}, 2), ({"zero_stage": "1.0"}, 1), ({"strategy": "SHARD_GRAD_OP"}, 2), ({"strategy": "ZeRO-3"}, 3),
     ({"strategy": "NO_SHARD"}, 0), ({"strategy": "DDP"}, 0), ({"framework": "fsdp"}, 3), ({}, 0), ({"zero_stage": "none"}, 0)],
)  # fmt: skip
def test_zero_stages(columns, stage):
    assert case_of(**columns).step.layout.zero_stage == stage


@pytest.mark.parametrize(
    ("text", "gigabytes_per_s"),
    [("4xHDR InfiniBand", 12.5), ("1600 Gbps", 25), ("200 Gbps", 25), ("100 Gbps", 12.5 / 8), ("400 Gb/s per GPU", 50),
     ("NVLink 600 GB/s; 8x200Gb/s IB", 25), ("50 GB/s per node", 50 / 8), ("NVLink", 25), ("4 * 100Gb RoCE", 6.25),
     ("8 \u00d7 HDR", 25), ("2x 25GbE", 6.25 / 8), ("NVLink + 100Gb/s IB", 12.5 / 8), ("Ethernet 25G", 3.125 / 8), ("A100-80GB", 25)],
)  # fmt: skip
def test_networks_in_words(text, gigabytes_per_s):
    cluster = case_of(n_gpus="16", interconnect=text).cluster
    assert cluster.across.bytes_per_s == pytest.approx(gigabytes_per_s * 1e9)


def test_pcie_in_words():
    assert case_of(n_gpus="4", interconnect="PCIe 4.0").cluster.inside.kind.startswith("PCIe")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"hidden": None}, "hidden"),
        ({"n_heads": "7"}, "7 heads"),
        ({"n_layers": "-3"}, "'-3'"),
        ({"seq_len": "0"}, "'0'"),
        ({"vocab": "many"}, "'many'"),
        ({"n_gpus": "8", "dp": "3", "tp": "2"}, "8 accelerators"),
        ({"n_gpus": "8", "tp": "3"}, "does not divide 8"),
        ({"gpu": "A1000"}, "'A1000'"),
        ({"n_kv_heads": "3"}, "3 key heads"),
        ({"schedule": "magic", "pp": "2"}, "'magic'"),
        ({"zero_stage": "4"}, "zero_stage"),
        ({"zero_stage": "2", "zeropp": "qgz"}, "ZeRO stage 2"),
        ({"dp": "8", "zero_stage": "3", "hpz_ranks": "3"}, "groups of 3"),
        ({"recompute": "some"}, "'some'"),
        ({"offload_alpha": "1.5"}, "'1.5'"),
        ({"precision": "int3"}, "'int3'"),
        ({"dp": "8", "global_batch_seqs": "4"}, "too small"),
        ({"n_gpus": "8", "tp": "8", "dp": "2"}, "16, but there are 8"),
        ({"n_gpus": "32", "tp": "2", "dp": "4"}, "8, but there are 32"),
        ({"n_experts": "8", "top_k": "9"}, "9 of 8"),
        ({"n_experts": "8", "ep": "3"}, "ep 3"),
        ({"dp": "8", "nodes": "3"}, "3 nodes"),
        ({"model": "state-spaces/mamba-790m"}, "no transformer"),
        ({"model": "Qwen3.5-72B"}, "no transformer"),
        ({"model": "NVIDIA Nemotron Nano 12B v2"}, "no transformer"),
    ],
)
def test_nonsense_is_one_sentence_and_the_other_rows_stay(columns, said):
    named = {**GPT, **columns}
    kept = {name: value for name, value in named.items() if value is not None}
    header = list({**GPT, **columns})
    bad = [kept.get(name, "") for name in header]
    good = [GPT.get(name, "") for name in header]
    rows = read_rows([header, bad, good], "a test")

    assert [row.case is None for row in rows] == [True, False]
    assert said in rows[0].error and "\n" not in rows[0].error


def test_headers_are_read_in_any_spelling_and_the_plainer_name_has_the_say():
    (row,) = read_rows(
        [["Num Layers", "Hidden Size", "heads", "micro_batch_size", "mbs"], ["2", "256", "2", "", "4"]],
        "a test",
    )
    assert row.case.architecture.n_layers == 2 and row.case.step.layout.micro_batch_size == 4


def test_no_header_means_two_columns():
    for column in COLUMNS:
        assert {NAMES[plain(name)] for name in (column.name, *column.aliases)} == {column.name}


@given(
    st.dictionaries(
        st.sampled_from([column.name for column in COLUMNS]),
        st.one_of(
            st.text(max_size=8),
            st.sampled_from(["0", "1", "-1", "3", "1e300", "nan", "True", "H100", "full"]),
        ),
    )
)
def test_any_row_gives_a_case_or_one_line(columns):
    named = {**GPT, **columns}
    (row,) = read_rows([list(named), list(named.values())], "a test")

    assert (row.case is None) == (row.error is not None)
    if row.error is not None:
        assert row.error and len(row.error.splitlines()) == 1
    else:
        assert row.case.step.layout.num_ranks == row.case.cluster.num_accelerators


def test_files_that_are_no_tables(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    (tmp_path / "y.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("x.csv", "y.csv", "missing.csv"):
        with pytest.raises(UsageError):
            read_layout_table(tmp_path / name)


def test_a_bare_count_beside_a_known_name_may_be_of_millions():
    """timm's tables have 86.57 of ViT-B: it was taken for a model of 86.57 billion."""
    shape = dict.fromkeys(("n_layers", "hidden", "n_heads", "vocab"))
    row = read_one(**shape, model="vit_base_patch16_384", param_count="86.86", seq_len=None)

    assert row.case is not None
    assert (row.case.architecture.hidden, row.case.step.seq_len) == (768, 577)
