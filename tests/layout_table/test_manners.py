"""Whole tables in people's manners: what is above the header, merged cells, captions, entities, other separators."""

import pytest

from memadvisor.layout_table.read import read_table
from memadvisor.layout_table.separated import separated_rows


def read(text):
    return read_table(separated_rows(text), "it")


def told(text):
    """Of each row its model, accelerators, tp, sequence and microbatch."""
    found = []
    for row in read(text).rows:
        assert row.error is None, row.error
        step, layout = row.case.step, row.case.step.layout
        ranks = layout.data * layout.tensor * layout.pipeline * layout.context
        name = row.case.architecture.name
        found.append((name, ranks, layout.tensor, step.seq_len, layout.micro_batch_size))
    return found


EIGHT = ("llama2-7b", 8, 1, 4096, 2)
SIXTEEN = ("llama2-7b", 16, 2, 4096, 1)


@pytest.mark.parametrize(
    "text",
    [
        "Model,GPUs,TP,Seq,MBS\nllama2-7b,8,1,4096,2\nllama2-7b,16,2,4096,1\n",
        "Model&nbsp;name,# GPUs,TP&nbsp;size,Seq&nbsp;length,Micro&#8209;batch size\nllama2-7b,8,1,4096,2\nllama2-7b,16,2,4096,1\n",
        "<b>Model</b>\u00a0,GPUs,TP,Seq<br>length,MBS\nllama2\u20117b,8,1,4096,2\n\u200bllama2-7b,16,2,4096,1\n",
        "Throughput, measured in May\n\nModel,GPUs,TP,Seq,MBS\nllama2-7b,8,1,4096,2\nllama2-7b,16,2,4096,1\n",
        "Llama 2 7B,,,\nGPUs,TP,Seq,MBS\n8,1,4096,2\n16,2,4096,1\n",
        "Model,GPUs,TP,Seq,MBS\nllama2-7b,8,1,4096,2\n,16,2,4096,1\n",
        "Model & GPUs & TP & Seq & MBS \\\\ \\hline\n\\textbf{llama2-7b} & 8 & 1 & 4096 & 2 \\\\\nllama2-7b & 16 & 2 & $4096$ & 1 \\\\\n",
        "\\begin{tabular}{l|rrrr}\n\\toprule\nModel & GPUs & TP & Seq & MBS \\\\\n\\midrule\nllama2-7b & 8 & 1 & 4096 & 2 \\\\\nllama2-7b & 16 & 2 & 4096 & 1 \\\\\n\\end{tabular}\n",
        "Model        GPUs  TP  Seq   MBS\nllama2-7b    8     1   4096  2\nllama2-7b    16    2   4096  1\n",
        "Model name   GPUs  TP  Seq   MBS\nLlama 2 7B   8     1   4096  2\nLlama 2 7B   16    2   4096  1\n",
        "Model;GPUs;TP;Seq;MBS\nllama2-7b;8;1;4.096;2\nllama2-7b;16;2;4 096;1\n",
        "Model,GPUs,TP,Seq,MBS\nllama2-7b\u00b9,8 (a),1,4096\u2020,2\nllama2-7b (b),16,2,4096,1\n",
        "Model,GPUs,TP,Seq,Batch size\nllama2-7b,8,1,4096,2/GPU\nllama2-7b,16,2,4096,1 per GPU\n",
        "Model,GPU,TP,Seq,Batch (micro/global)\nllama2-7b,A100 x 8,1,4096,2/128\nllama2-7b,A100-80G x 16,2,4096,1/128\n",
        "Model,Parallelism,GPUs\nllama2-7b,TP1-SEQ4K-BS2,8\nllama2-7b,TP2-SEQ4K-MBS1,16\n",
    ],
)  # fmt: skip
def test_one_table_in_many_manners(text):
    assert told(text) == [EIGHT, SIXTEEN]


def test_a_caption_among_the_rows_has_an_error_of_its_own_and_names_the_rows_below():
    rows = read(
        "Model,GPUs,TP,Seq,MBS\nLlama 2 7B,,,,\n,8,1,4096,2\nLlama 2 13B,,,,\n,8,2,4096,1\n,16,2,4096,1\n"
    ).rows
    assert [row.case and row.case.architecture.name for row in rows] == [
        None, "llama2-7b", None, "llama2-13b", "llama2-13b",
    ]  # fmt: skip
    assert rows[0].error == rows[2].error == "no layout, but the model of the rows below it."
    assert any("cells above" in note for note in rows[4].notes)


def test_an_empty_cell_before_a_models_own_is_no_merged_one():
    rows = read("source,model,GPUs,Seq,MBS\nnanotron,llama2-7b,8,4096,1\n,llama2-7b,8,4096,1\n").rows
    assert [row.case.step.software.name for row in rows] == ["nanotron", "default"]


def test_a_batch_of_a_replica_in_one_row_is_so_in_all():
    text = "Model,GPUs,Seq,Batch size\nllama2-7b,8,4096,4\nllama2-7b,8,4096,8\n"
    assert [micro for *_, micro in told(text)] == [4, 8]
    text = "Model,GPUs,Seq,Batch size\nllama2-7b,1,4096,4\nllama2-7b,8,4096,8\n"
    assert [row.case.step.layout.micro_batch_size for row in read(text).rows] == [4, 1]


@pytest.mark.parametrize(
    ("method", "recompute", "dtype"),
    [
        ("FSDP", "none", "bfloat16"),
        ("FSDP + AC", "full", "bfloat16"),
        ("FSDP + selective AC", "selective", "bfloat16"),
        ("FSDP, no AC", "none", "bfloat16"),
        ("ZeRO-3 + gradient checkpointing", "full", "bfloat16"),
        ("FSDP + torch.compile + Float8", "none", "float8_e4m3fn"),
    ],
)
def test_what_a_method_of_several_has_beside_who_shards(method, recompute, dtype):
    (row,) = read(f'Model,GPUs,GPU,Seq,MBS,Method\nllama2-7b,8,H100,4096,1,"{method}"\n').rows
    assert (row.case.step.layout.recompute, row.case.step.software.compute_dtype) == (recompute, dtype)
    assert row.case.step.layout.zero_stage == 3


def test_names_of_sagemaker_axolotl_megatron_and_maxtext():
    (row,) = read(
        "Instance type,Number of instances,Model,Sharding degree,Activation offloading,MBS,Seq\n"
        "ml.p4d.24xlarge,16,GPT-NeoX-20B,128,true,8,2048\n"
    ).rows
    layout = row.case.step.layout
    assert row.case.cluster.accelerator.name == "A100-SXM4-40GB" and layout.data == 128
    assert (layout.shard, layout.zero_stage, layout.offload_activations) == (128, 3, 1.0)

    (row,) = read(
        "base_model,adapter,sequence_len,micro_batch_size,gpus,gpu,deepspeed\n"
        "NousResearch/Llama-2-13b-hf,LoRA r=16,4096,1,64,H100s,configs/zero3.json\n"
    ).rows
    assert row.case.step.software.lora.rank == 16 and row.case.step.layout.zero_stage == 3
    assert row.case.cluster.accelerator.name.startswith("H100")

    (row,) = read("model,bf16,fp8_format,gpu,seq,mbs\nllama2-7b,True,hybrid,H100,4096,1\n").rows
    assert row.case.step.software.compute_dtype.startswith("float8")

    (row,) = read(
        "Hardware,model,ici_fsdp_parallelism,per_device_batch_size,seq\nv5e-256,llama2-7b,256,1,2048\n"
    ).rows
    assert row.case.step.software.name == "jax" and row.case.step.layout.shard == 256


def test_no_more_tokens_than_a_model_has_positions():
    rows = read("model,gpu,mbs\nbert-base,V100,8\ngpt2-medium,V100,8\nllama2-7b,V100,1\n").rows
    assert [row.case.step.seq_len for row in rows] == [512, 1024, 2048]


def test_long_sequences_are_of_after_flash_attention():
    rows = read("model,gpu,gpus,seq,mbs\nGPT 7B,A100,8,2048,1\nGPT 7B,A100,8,64K,1\n").rows
    assert [row.case.step.software.fused_attention for row in rows] == [False, True]


def layout_of(text):
    (row,) = read(text).rows
    assert row.error is None, row.error
    return row.case.step.layout


def test_a_batch_beside_a_number_of_microbatches_is_the_steps():
    layout = layout_of("Model,#GPUs,PP,Batch,#Microbatches,Seq\nGPT 39B,64,16,1024,64,2048\n")
    assert (layout.data, layout.micro_batch_size, layout.num_microbatches) == (4, 4, 64)
    layout = layout_of("Config (PxD),Model,Mini-batch,Micro-batch,Seq\n18 x 4,GPT-2 8.3B,8192,4,1024\n")
    assert (layout.pipeline, layout.data, layout.micro_batch_size, layout.num_microbatches) == (18, 4, 4, 512)
    layout = layout_of("Model,GPUs,Mini-batch size,Seq\nllama2-7b,8,2,4096\n")
    assert (layout.micro_batch_size, layout.num_microbatches) == (2, 1)


def test_cards_that_a_header_counts():
    (row,) = read("Model,# of Gaudi3 cards,MBS,Seq\nLlama2 13B,16,1,4096\n").rows
    assert row.case.cluster.accelerator.name == "Gaudi-3-128GB" and row.case.step.layout.data == 16
    assert read("Model,MBS,Seq,H100\nllama2-7b,1,4096,12000\n").unread == ("H100",)  # a measurement


def test_all_of_the_replicas_share_shards():
    layout = layout_of("model,gpus,dp_replicate,dp_shard,tp,mbs,seq\nllama3-70b,128,1,-1,8,4,8192\n")
    assert (layout.data, layout.tensor, layout.zero_stage, layout.shard) == (16, 8, 3, None)


def test_more_headers_with_what_they_count():
    (row,) = read(
        "Model size (billion params),#layers,Hidden dim,Batch size / GPU (FP16),Seq\n8.3,72,3072,4,1024\n"
    ).rows
    assert row.case.step.layout.micro_batch_size == 4 and row.case.architecture.n_layers == 72
    assert layout_of("model,gpus,strategy,mbs\ngpt2-xl,8,ddp_sharded,1\n").zero_stage == 2


def test_layouts_in_columns():
    text = "Parameter,Llama 2 7B,Llama 2 7B\nGPUs,8,16\nTensor parallel,1,2\nSequence length,4096,4096\nMicro batch size,2,1\nTime (s),3,4\n"
    assert told(text) == [EIGHT, SIXTEEN]
    assert read(text).unread == ("Time (s)",)
    assert told("model,llama2-7b\ngpus,8\nseq,4096\nmbs,2\n") == [EIGHT]


def test_headers_in_chinese():
    text = "\u6a21\u578b,\u5361\u6570,\u5f20\u91cf\u5e76\u884c,\u5e8f\u5217\u957f\u5ea6,\u5fae\u6279\u5927\u5c0f\n"
    assert told(f"{text}llama2-7b,8,1,4096,2\nllama2-7b,16,2,4096,1\n") == [EIGHT, SIXTEEN]


@pytest.mark.parametrize(
    ("batch", "sequences"), [("4M tokens", 1024), ("4M", 1024), ("1024 seqs", 1024), ("1k", 1000), ("524288 tokens", 128)]
)  # fmt: skip
def test_batches_in_tokens(batch, sequences):
    layout = layout_of(f'Model,GPUs,MBS,Seq,Batch\nllama2-7b,8,1,4096,"{batch}"\n')
    assert layout.num_microbatches == pytest.approx(sequences / 8, rel=0.05)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("DeepSeek V3 (671B)", "deepseek-v3"),
        ("LLAMA2 70B (GQA)", "llama2-70b"),
        ("GPT-3 (1.3B)", "gpt3-1.3b"),
    ],
)
def test_names_with_brackets_behind(name, found):
    (row,) = read(f"Model,GPUs,MBS,Seq\n{name},8,1,512\n").rows
    assert row.case.architecture.name == found


def test_degrees_in_words_and_counts_with_separators():
    layout = layout_of(
        'Model,GPUs,Parallelism,MBS,Seq\nllama2-7b,"1,024 x H100","tensor 8, pipeline 2",1,4096\n'
    )
    assert (layout.tensor, layout.pipeline, layout.data) == (8, 2, 64)
