"""Rows in the words of strangers mean what they say; what cannot be meant is one sentence."""

import pytest

from tests.layout_table.test_read import case_of, read_one


def layout_of(**columns):
    return case_of(**{"n_gpus": "8", **columns}).step.layout


@pytest.mark.parametrize(
    ("columns", "fields"),
    [
        ({"parallelism": "TP4 PP2"}, {"tensor": 4, "pipeline": 2, "data": 1}),
        ({"parallelism": "(TP, PP, DP) = (2, 2, 2)"}, {"tensor": 2, "pipeline": 2, "data": 2}),
        ({"parallel plan": "TP=2,PP=4"}, {"tensor": 2, "pipeline": 4, "data": 1}),
        ({"plan": "FSDP (FULL_SHARD) + AC"}, {"zero_stage": 3, "recompute": "full"}),
        ({"strategy": "TP2 PP2", "framework": "DeepSpeed ZeRO-1"}, {"tensor": 2, "pipeline": 2, "zero_stage": 1}),
        ({"strategy": "ZeRO++ (hpZ + qwZ)", "nodes": "2"}, {"zero_stage": 3, "quantized_weights": True, "quantized_gradients": False}),
        ({"n_gpus": None, "gpu": "16 A100-SXM4-80GB"}, {"data": 16}),
        ({"n_gpus": None, "gpu": None, "cluster": "4 nodes \u00d7 8 H20, 400 Gb/s"}, {"data": 32}),
        ({"n_gpus": None, "gpu": "4090"}, {"data": 1}),
        ({"n_gpus": None, "gpu": "3090 Ti"}, {"data": 1}),
        ({"act_ckpt": "GC on"}, {"recompute": "full"}),
        ({"act_ckpt": "ckpt off"}, {"recompute": "none"}),
        ({"act_ckpt": "activation checkpointing: disabled"}, {"recompute": "none"}),
        ({"batch_size": "2 (per device)"}, {"micro_batch_size": 2, "num_microbatches": 1}),
        ({"batch_size": "global 64"}, {"micro_batch_size": 1, "num_microbatches": 8}),
        ({"gbs": "64 (total)"}, {"num_microbatches": 8}),
        ({"pp": "2", "schedule": "VPP=3"}, {"schedule": "interleaved", "chunks": 3}),
        ({"pp": "2", "schedule": "v=2"}, {"schedule": "interleaved", "chunks": 2}),
        ({"parallelism": "PP2DP4TP1"}, {"tensor": 1, "pipeline": 2, "data": 4}),
        ({"parallelism": "dp=2,tp=4", "tp": "2", "dp": "4"}, {"tensor": 2, "data": 4}),
        ({"tensor parallelism": "2", "pipeline parallelism": "4"}, {"tensor": 2, "pipeline": 4, "data": 1}),
        ({"sp_size": "4"}, {"context": 4, "context_kind": "ulysses", "data": 2}),
        ({"sequence_parallel": "4"}, {"context": 4, "context_kind": "ulysses"}),
        ({"sequence_parallel": "4", "tp": "4"}, {"context": 1, "sequence_parallel": True}),
        ({"sequence_parallel": "1", "tp": "4"}, {"sequence_parallel": True}),
        ({"ulysses_degree": "2", "ring_degree": "2"}, {"context": 4, "context_kind": "ring"}),
        ({"pp": "2", "schedule": "interleaved (v=3)"}, {"chunks": 3, "schedule": "interleaved"}),
        ({"pp": "2", "schedule": "1F1B (non-interleaved)"}, {"chunks": 1, "schedule": "1f1b"}),
        ({"pp": "2", "method": "ZB-1p"}, {"schedule": "zb-1p"}),
        ({"schedule": "no pipeline"}, {"schedule": "1f1b"}),
        ({"framework": "DeepSpeed ZeRO-2"}, {"zero_stage": 2}),
        ({"framework": "DeepSpeed ZeRO-3 + offload"}, {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}),
        ({"zero_stage": "ZeRO-Offload"}, {"zero_stage": 2, "offload_optimizer": True, "offload_parameters": False}),
        ({"zero_stage": "ZeRO-Infinity"}, {"zero_stage": 3, "offload_parameters": True}),
        ({"zero_stage": "P_os+g"}, {"zero_stage": 2}),
        ({"zero_stage": "distributed optimizer"}, {"zero_stage": 1}),
        ({"zero_stage": "no"}, {"zero_stage": 0}),
        ({"strategy": "SHARD_GRAD_OP"}, {"zero_stage": 2}),
        ({"offload": "none"}, {"offload_optimizer": False}),
        ({"offload": "cpu", "zero": "2"}, {"offload_optimizer": True, "offload_parameters": False}),
        ({"offload": "activations"}, {"offload_activations": 1.0, "offload_optimizer": False}),
        ({"offload_alpha": "50%"}, {"offload_activations": 0.5}),
        ({"act_ckpt": "w/o"}, {"recompute": "none"}),
        ({"act_ckpt": "gradient checkpointing"}, {"recompute": "full"}),
        ({"act_ckpt": "attn"}, {"recompute": "selective"}),
        ({"act_ckpt": "w/ AC"}, {"recompute": "full"}),
        ({"act_ckpt": "w/o AC"}, {"recompute": "none"}),
        ({"act_ckpt": "GC"}, {"recompute": "full"}),
        ({"act_ckpt": "no GC"}, {"recompute": "none"}),
        ({"act_ckpt": "8", "n_layers": "32"}, {"recompute": "full", "recompute_share": 0.25}),
        ({"act_ckpt": "full with CPU offload"}, {"recompute": "full", "offload_activations": 1.0}),
        ({"act_ckpt": "full+offload"}, {"recompute": "full", "offload_activations": 1.0}),
        ({"remat_policy": "minimal_flash"}, {"recompute": "pointwise", "offload_activations": 0.0}),
        ({"remat_policy": "minimal_offloaded"}, {"recompute": "pointwise", "offload_activations": 1.0}),
        ({"remat_policy": "dots_with_no_batch_dims_saveable"}, {"recompute": "pointwise"}),
        ({"remat_policy": "nothing_saveable"}, {"recompute": "full"}),
        ({"remat_policy": "everything_saveable"}, {"recompute": "none"}),
        ({"remat_policy": "save_qkv_proj"}, {"recompute": "full", "offload_activations": 0.0}),
        ({"gradient_checkpointing": "unsloth"}, {"recompute": "full", "offload_activations": 1.0}),
        ({"gradient_checkpointing": "offload"}, {"recompute": "full", "offload_activations": 1.0}),
        ({"framework": "MaxText", "per_device_batch_size": "0.5", "tp": "2"}, {"micro_batch_size": 1, "data": 4}),
        ({"n_gpus": None, "# HPU": "8", "FSDP_SHARDING": "shard_grad_op (ZeRO-2, default)"}, {"data": 8, "zero_stage": 2}),
        ({"batch_size": "64", "mbs": "2"}, {"micro_batch_size": 2, "num_microbatches": 4}),
        ({"batch_size": "4", "grad_accum": "2"}, {"micro_batch_size": 4, "num_microbatches": 2}),
        ({"batch_size": "4"}, {"micro_batch_size": 4, "num_microbatches": 1}),
        ({"p": "2", "t": "2", "b": "4", "B": "32"}, {"pipeline": 2, "tensor": 2, "micro_batch_size": 4, "num_microbatches": 4}),
        ({"No. of GPUs": "8", "Tensor parallel size (t)": "4", "n_gpus": None}, {"tensor": 4, "data": 2}),
        ({"n_gpus": None, "#GPU": "8", "method": "Megatron TP=4"}, {"tensor": 4, "data": 2}),
        ({"config": "tp2-pp2-mbs2-gbs16"}, {"tensor": 2, "pipeline": 2, "micro_batch_size": 2, "num_microbatches": 4}),
        ({"n_gpus": None, "parallelism": "FSDP 4, TP 2"}, {"data": 4, "tensor": 2, "zero_stage": 3, "shard": 4}),
        ({"parallelism": "FSDP2 + TP4"}, {"data": 2, "tensor": 4, "zero_stage": 3, "shard": None}),
        ({"parallelism": "ZeRO-1, TP4"}, {"tensor": 4, "zero_stage": 1}),
        ({"fsdp": "yes"}, {"data": 8, "zero_stage": 3}),
        ({"n_gpus": None, "fsdp": "8", "tp": "2"}, {"data": 8, "tensor": 2, "zero_stage": 3}),
        ({"fsdp": "shard_grad_op auto_wrap"}, {"zero_stage": 2}),
        ({"fsdp": "1", "tp": "8"}, {"tensor": 8, "zero_stage": 0}),
        ({"strategy": "HSDP (2x4)"}, {"zero_stage": 3, "shard": 4}),
        ({"dp_shard": "4", "dp_replicate": "2"}, {"zero_stage": 3, "shard": 4, "data": 8}),
        ({"fsdp": "8", "cp": "2"}, {"zero_stage": 3, "shard": None, "data": 4}),
        ({"parallelism": "t=4, p=2, d=1"}, {"tensor": 4, "pipeline": 2}),
        ({"parallelism": "D1T4P2"}, {"tensor": 4, "pipeline": 2}),
        ({"parallelism": "2D x 4T"}, {"tensor": 4, "data": 2}),
        ({"parallelism": "4-way TP + 2-way pipeline"}, {"tensor": 4, "pipeline": 2}),
        ({"parallelism": "tensor=4, pipeline parallel = 2"}, {"tensor": 4, "pipeline": 2}),
        ({"strategy": "FSDP, model 7B, context 4096"}, {"tensor": 1, "context": 1, "zero_stage": 3}),
        ({"parallelism": "TP(4)PP(2)"}, {"tensor": 4, "pipeline": 2}),
        ({"Quantization": "fp8", "gpu": "H100"}, {"data": 8}),
        ({"seq_len": None, "max_target_length": "8192", "mbs": "1"}, {"data": 8}),
        ({"act_ckpt": "\u2714\ufe0f"}, {"recompute": "full"}),
        ({"dist_opt": "yes"}, {"zero_stage": 1}),
        ({"dist_opt": "yes", "zero": "3"}, {"zero_stage": 3}),
        ({"zero_stage": "3 (offload)"}, {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}),
        ({"CPU Offload": "optimizer + params", "zero": "3"}, {"offload_optimizer": True, "offload_parameters": True}),
        ({"CPU Offload": "activations"}, {"offload_activations": 1.0, "offload_optimizer": False}),
        ({"act_ckpt": "AC: full"}, {"recompute": "full"}),
        ({"act_ckpt": "True (reentrant)"}, {"recompute": "full"}),
        ({"act_ckpt": "0%"}, {"recompute": "none"}),
        ({"mbs": "2*", "seq_len": "2^11"}, {"micro_batch_size": 2}),
        ({"mbs": "2[^1]"}, {"micro_batch_size": 2}),
        ({"mbs": "2 (OOM at 4)"}, {"micro_batch_size": 2}),
        ({"pp": "2", "vpp": "0"}, {"chunks": 1}),
        ({"n_gpus": "1", "batch_size": "4"}, {"micro_batch_size": 4, "num_microbatches": 1}),
        ({"tokens_per_batch": "65,536 tokens", "mbs": "1"}, {"num_microbatches": 8}),
    ],
)  # fmt: skip
def test_what_words_mean(columns, fields):
    layout = layout_of(**columns)

    assert {name: getattr(layout, name) for name in fields} == fields


def test_accelerators_with_their_name_and_flags_of_dtypes():
    case = case_of(gpu=None, gpus="8 x H100", bf16="True")
    assert (case.cluster.accelerator.name, case.cluster.num_accelerators) == ("H100-SXM-80GB", 8)
    assert case_of(fp16="True", bf16="False").step.software.compute_dtype == "float16"


@pytest.mark.parametrize(
    ("columns", "nodes", "per_node", "device"),
    [
        ({"gpu": "2 nodes x 8 H100"}, 2, 8, "H100-SXM-80GB"),
        ({"gpu": "8xH100 80GB"}, 1, 8, "H100-SXM-80GB"),
        ({"n_gpus": "16 GPUs (2 nodes)"}, 2, 8, "A100-SXM4-80GB"),
        ({"n_gpus": "2 nodes"}, 2, 8, "A100-SXM4-80GB"),
        ({"n_gpus": "8x"}, 1, 8, "A100-SXM4-80GB"),
        ({"nodes": "2 x 8xH100", "gpu": None}, 2, 8, "H100-SXM-80GB"),
        ({"gpu": "2x v5e-8"}, 1, 16, "TPU-v5e-16GB"),
        ({"gpu": "MI300X (8 GPUs)"}, 1, 8, "MI300X-192GB"),
        ({"gpu": "1 node MI300X"}, 1, 8, "MI300X-192GB"),
        ({"gpu": "v5e-16"}, 1, 16, "TPU-v5e-16GB"),
        ({"gpu": "TPU v5p-32"}, 1, 16, "TPU-v5p-95GB"),
        ({"gpu": "H100", "n_gpus": "8"}, 1, 8, "H100-SXM-80GB"),
    ],
)
def test_counts_that_stand_with_what_they_count(columns, nodes, per_node, device):
    cluster = case_of(**columns).cluster

    assert (cluster.num_nodes, cluster.per_node, cluster.accelerator.name) == (nodes, per_node, device)


def test_a_number_of_parameters_tells_which_of_a_family_it_is():
    """GPT-3 is the one of 175B only where nothing else is said."""
    shape = {"n_layers": None, "hidden": None, "n_heads": None, "vocab": None, "model": "GPT-3"}

    assert case_of(**shape, params_b="2.7").architecture.name == "gpt3-2.7b"
    assert case_of(**shape, params_b="175").architecture.name == "gpt3-175b"


def test_degrees_without_names_are_said_not_to_be_understood():
    assert "parallelism '(4,2,1)' is not understood" in read_one(n_gpus="8", parallelism="(4,2,1)").notes


def test_a_targets_length_is_the_sequences_where_there_is_no_encoder():
    assert case_of(seq_len=None, max_target_length="8192").step.seq_len == 8192


def test_adapters_that_are_not_modelled_are_refused_in_a_method_too():
    assert "prefix-tuning" in read_one(method="Prefix-tuning").error


@pytest.mark.parametrize(
    ("columns", "shape", "noted"),
    [
        ({"strategy": "ZeRO-1 + TP"}, (8, 1, 1), "tensor parallelism named without a degree"),
        ({"strategy": "3D (TP+PP+DP)"}, (8, 1, 1), "tensor parallelism, a pipeline named without a degree"),
        ({"strategy": "ZeRO-1 + TP", "tp": "2"}, (4, 2, 1), None),
        ({"strategy": "ZeRO-1 + TP", "dp": "2"}, (2, 4, 1), None),
        ({"strategy": "TP + PP", "dp": "2", "tp": "2"}, (2, 2, 2), None),
        ({"strategy": "TP only"}, (1, 8, 1), None),
        ({"parallelism": "pipeline"}, (1, 1, 8), None),
    ],
)
def test_a_parallelism_without_a_degree_has_what_is_left_or_is_said_to_be_open(columns, shape, noted):
    row = read_one(**{"n_gpus": "8", **columns})
    layout = row.case.step.layout
    assert (layout.data, layout.tensor, layout.pipeline) == shape
    told = [note for note in row.notes if "without a degree" in note or "not understood" in note]
    assert told == [] if noted is None else noted in told[0]


@pytest.mark.parametrize(
    ("columns", "on_disk"),
    [
        ({"offload": "NVMe"}, True),
        ({"strategy": "ZeRO-3 + NVMe offload"}, True),
        ({"offload": "optimizer to SSD"}, True),
        ({"offload": "CPU"}, False),
    ],
)
def test_what_is_on_a_disk_is_said_to_be_priced_as_the_hosts_memory(columns, on_disk):
    row = read_one(**{"n_gpus": "8", "zero_stage": "3", **columns})
    assert row.case.step.layout.offload_optimizer
    assert any("disks are not priced" in note for note in row.notes) is on_disk


def test_a_strategy_that_is_one_parallelism_alone_has_all_accelerators():
    shapes = {
        text: layout_of(strategy=text) for text in ("PP (GPipe)", "Pipeline parallel", "tensor_parallel", "Ring Attention", "Ulysses-4", "TP")
    }  # fmt: skip

    assert {text: (each.data, each.tensor, each.pipeline, each.context) for text, each in shapes.items()} == {
        "PP (GPipe)": (1, 1, 8, 1),
        "Pipeline parallel": (1, 1, 8, 1),
        "tensor_parallel": (1, 8, 1, 1),
        "Ring Attention": (1, 1, 1, 8),
        "Ulysses-4": (2, 1, 1, 4),
        "TP": (1, 8, 1, 1),
    }
    assert shapes["PP (GPipe)"].schedule == "gpipe" and shapes["Ulysses-4"].context_kind == "ulysses"
    assert layout_of(strategy="Pipeline parallel", pp="2").pipeline == 2


def test_a_degree_of_0_is_none_of_that_parallelism():
    assert layout_of(tp="0", pp="0", cp="0.0", dp="8").data == 8


def test_who_shards_stands_beside_what_else_a_method_is():
    rows = [
        layout_of(parallelism="FSDP 4, TP 2", strategy=strategy) for strategy in ("Per-op SAC", "compile, async TP", "1F1B", "w/ prefetch")
    ]  # fmt: skip
    assert [(each.zero_stage, each.data, each.tensor) for each in rows] == [(3, 4, 2)] * 4
    assert layout_of(fsdp="yes", strategy="compile, async TP").zero_stage == 3
    assert layout_of(fsdp="yes", strategy="ZeRO-1").zero_stage == 1


def test_cards_among_the_words_of_a_method():
    bare = {"gpu": None, "n_gpus": None}
    for text, count, card in (
        ("8xA100 FSDP", 8, "A100-SXM4-80GB"),
        ("2x8 H100 TP=8 PP=2", 16, "H100-SXM-80GB"),
    ):
        cluster = case_of(**bare, strategy=text).cluster
        assert (cluster.num_accelerators, cluster.accelerator.name) == (count, card)
    assert case_of(gpu="v5p", n_gpus="8").cluster.accelerator.name == "TPU-v5p-95GB"


def test_schedules_and_parts_of_a_layer_that_are_not_known_are_noted():
    found = read_one(n_gpus="8", pp="4", schedule="V-Half", recompute="mlp")
    layout = found.case.step.layout
    assert (layout.schedule, layout.recompute) == ("1f1b", "selective")
    assert [name in " ".join(found.notes) for name in ("'V-Half' is not known", "'mlp' is not understood")] == [True, True]  # fmt: skip


def test_cells_in_quotes():
    assert layout_of(recompute="'full'", offload_optimizer="'True'").offload_optimizer is True


def test_degrees_of_a_dictionary():
    assert layout_of(parallelism="{'tp': 2, \"pp\": 2, 'dp': 2}").tensor == 2
    assert layout_of(parallelism='{"tensor": 4, "data": 2}').tensor == 4


def test_a_configuration_may_be_all_there_is():
    bare = dict.fromkeys(("n_layers", "hidden", "n_heads", "vocab", "seq_len", "gpu"))
    case = case_of(**bare, config="Llama-3-8B / 8xH100 / bs4 / seq8192 / FSDP")

    assert (case.architecture.name, case.cluster.accelerator.name) == ("llama3-8b", "H100-SXM-80GB")
    layout = case.step.layout
    assert (layout.data, layout.zero_stage, layout.micro_batch_size, case.step.seq_len) == (8, 3, 4, 8192)


def test_accelerators_by_nodes():
    """`2x8`; and nodes alone are full ones."""
    for columns in ({"n_gpus": "2x8"}, {"nodes": "2"}):
        cluster = case_of(**columns).cluster
        assert (cluster.num_nodes, cluster.per_node) == (2, 8)


@pytest.mark.parametrize(
    ("columns", "share"),  # of the 8 layers of a stage
    [
        ({"act_ckpt": "full"}, 1.0),
        ({"act_ckpt": "every 2 layers"}, 0.5),
        ({"act_ckpt": "every other layer"}, 0.5),
        ({"act_ckpt": "every 4th"}, 0.25),
        ({"act_ckpt": "25%"}, 0.25),
        ({"act_ckpt": "selective layer"}, 0.5),
        ({"act_ckpt": "selective (layer 4)"}, 0.25),
        ({"act_ckpt": "3 of 4 layers"}, 0.75),
        ({"act_ckpt": "12/32 layers"}, 0.375),
        ({"act_ckpt": "block:2"}, 0.25),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "4"}, 0.5),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "20"}, 1.0),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1"}, 1.0),
        ({"act_ckpt": "full", "recompute_num_layers": "1"}, 1.0),
        ({"recompute_method": "block", "recompute_num_layers": "1"}, 0.125),
        ({"act_ckpt_layers": "6"}, 0.75),
    ],
)
def test_how_many_layers_run_again(columns, share):
    layout = case_of(n_layers="32", n_gpus="8", pp="4", **columns).step.layout
    assert (layout.recompute, layout.recompute_share) == ("full", share)


def test_no_layers_to_recompute_are_no_recomputation():
    for columns in (
        {"act_ckpt_layers": "0"},
        {"act_ckpt": "3 of 0 layers"},
        {"recompute_method": "block", "recompute_num_layers": "0"},
    ):
        assert case_of(n_gpus="8", **columns).step.layout.recompute == "none"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"act_ckpt": "partial"}, "recompute_layers does"),
        ({"pp": "2", "schedule": "sideways"}, "no known schedule"),
        ({"zero_stage": "-1"}, "it is 0, 1, 2 or 3"),
        ({"precision": "int8"}, "no precision"),
    ],
)
def test_what_is_not_known_is_one_sentence(columns, said):
    assert said in read_one(n_gpus="8", **columns).error


@pytest.mark.parametrize(
    ("columns", "layers", "hidden"),
    [
        ({"model": "7B"}, 32, 4096),
        ({"model": "GPT", "params_b": "6.7"}, 32, 4096),
        ({"model": "gpt", "n_params": "22e9"}, 48, 6144),
        ({"model": "GPT 20B"}, 40, 6400),
        ({"model": "LLaMA", "n_params": "65B"}, 80, 8192),
    ],
)
def test_a_size_alone_has_the_shape_of_the_published_model_next_to_it(columns, layers, hidden):
    row = read_one(**{**dict.fromkeys(("n_layers", "hidden", "n_heads", "vocab")), **columns})

    assert (row.case.architecture.n_layers, row.case.architecture.hidden) == (layers, hidden)
    assert any("no shape" in note for note in row.notes)


def test_shapes_between_published_sizes_grow_with_the_size():
    sizes = [0.2, 1, 2, 5, 10, 15, 20, 30, 50, 100, 250, 400, 700, 2000]
    for model in ("gpt", "llama"):
        counts = [
            read_one(n_layers=None, hidden=None, n_heads=None, vocab=None, model=model, params_b=str(size))
            .case.architecture.num_parameters() / 1e9
            for size in sizes
        ]  # fmt: skip
        assert counts == sorted(counts)
        assert all(abs(count / size - 1) < 0.12 for count, size in zip(counts, sizes, strict=True))


def test_query_heads_that_the_row_has_otherwise_keep_keys_of_their_own():
    """A GPT of 128 heads by a known name has no groups of keys; a Llama keeps its groups."""
    gpt = case_of(model="gpt3-175b", n_layers="96", hidden="12288", n_heads="128").architecture
    llama = case_of(model="llama3-8b", n_layers="32", hidden="4096", n_heads="64").architecture

    assert (gpt.n_kv_heads, llama.n_kv_heads) == (128, 8)
