"""What the trainer of a row does, where the row says it."""

import pytest

from tests.layout_table.test_read import case_of, read_one


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("false", 1.0),
        ("true", 0.0),
        ("full_iteration", 0.0),
        ("attn", 0.75),
        ("attn+moe_router+moe_preprocess", 0.5),
        ("attn, moe_router, mlp", 0.0),
    ],
)
def test_launches_that_graphs_leave(text, share):
    assert case_of(cuda_graphs=text).step.software.launch_share == share


def test_words_of_megatron_bridge():
    software = case_of(moe_a2a_overlap="True", grad_reduce_dtype="bf16", precision="FP8-MX").step.software
    assert software.expert_overlap and software.reduce_bytes == 2
    assert software.compute_dtype.startswith("float8")


@pytest.mark.parametrize(
    ("framework", "dtype", "kept"), [("Megatron-Bridge", "fp32", 4), ("NeMo", "", 2), ("Megatron-Core", "bf16", 2), ("FSDP", "bf16", 4)]
)  # fmt: skip
def test_megatron_sums_gradients_in_the_dtype_that_it_reduces(framework, dtype, kept):
    """Its buffer of gradients is what is reduced; other trainers sum in one dtype and reduce in another."""
    software = case_of(framework=framework, reduce_dtype=dtype, precision="bf16").step.software
    assert software.gradient_bytes == kept


def test_a_trainer_that_is_not_known_is_as_none():
    """A GPT on a V100 has Megatron's scores in memory, as without a framework."""
    gpt = {"n_layers": "16", "hidden": "1536", "n_heads": "16", "ffn": "", "gpu": "V100"}
    names = ("", "OneFlow", "torchtitan")
    assert [case_of(**gpt, framework=name).step.software.fused_attention for name in names] == [
        False,
        False,
        True,
    ]


def test_fsdp_has_all_state_on_the_host_or_none():
    on_host = [
        case_of(framework=name, cpu_offload="true", n_gpus="8").step.layout.offload_parameters
        for name in ("torchtune", "FSDP2", "deepspeed")
    ]
    assert on_host == [True, True, False]


def test_the_loss_by_pieces():
    software = [case_of(**row).step.software for row in ({}, {"liger": "true"}, {"framework": "torchtune"})]
    assert [each.linear_loss for each in software] == [False, True, True]


def test_the_dtype_of_the_cross_entropy():
    assert [case_of(loss_dtype=text).step.software.loss_bytes for text in ("", "fp32", "bf16")] == [4, 4, 2]


def test_recipes_of_nemo_reduce_in_16_bits_and_overlap_more_than_megatron_core():
    nemo, core = (
        case_of(framework=name, gpu="H100").step.software for name in ("Megatron-Bridge", "Megatron-LM")
    )
    assert (nemo.name, nemo.reduce_bytes, core.name, core.reduce_bytes) == ("nemo", 2, "megatron-core", 4)
    assert nemo.tensor_overlap == 2 * core.tensor_overlap


@pytest.mark.parametrize(("framework", "chunks"), [("torchtitan", 2), ("megatron-core", 6)])
def test_parts_of_the_model_on_each_rank_where_an_interleaved_schedule_does_not_say(framework, chunks):
    """torchtitan makes two stages a rank, Megatron is taken to have one of each layer."""
    row = {"framework": framework, "gpu": "H100", "pp": "4", "n_gpus": "4", "tp": "1", "dp": "1"}
    layout = case_of(schedule="interleaved", **row).step.layout
    assert (layout.schedule, layout.chunks) == ("interleaved", chunks)


def test_a_mixed_precision_of_no_name_is_what_the_card_has():
    """`amp` on a V100, which has no bf16, is fp16."""
    dtypes = {gpu: case_of(gpu=gpu, precision="amp").step.software.compute_dtype for gpu in ("V100", "H100")}

    assert dtypes == {"V100": "float16", "H100": "bfloat16"}


def test_products_in_8_bits_by_what_scales_them():
    assert case_of(gpu="H100", float8="rowwise").step.software.compute_dtype == "float8_e4m3fn"
    assert case_of(gpu="H100", float8="no").step.software.compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    "said", [{"precision": "float8 rowwise"}, {"precision": "fp8-row-wise"}, {"float8": "rowwise"}]
)
def test_rows_with_a_scale_each_are_gathered_in_16_bits(said):
    software = case_of(gpu="H100", framework="torchtitan", **said).step.software
    assert software.compute_dtype.startswith("float8")
    assert software.scales == "rows" and not software.gathers_narrow
    others = case_of(gpu="H100", framework="torchtitan", precision="float8 tensorwise").step.software
    assert others.gathers_narrow and others.scales != "rows"


@pytest.mark.parametrize(
    ("mode", "fused"), [("max-autotune", True), ("inductor", True), ("yes", True), ("eager", False)]
)
def test_modes_of_the_compiler(mode, fused):
    assert case_of(framework="fsdp", **{"torch.compile": mode}).step.software.fused_mlp == fused


def test_families_of_after_flash_attention_have_it_on_a100_too():
    shape = {"n_layers": None, "hidden": None, "n_heads": None, "vocab": None}
    fused = {
        name: case_of(**shape, model=name).step.software.fused_attention
        for name in ("GPT-3 175B", "MPT-7B", "Nemotron-4-15B")
    }

    assert fused == {"GPT-3 175B": False, "MPT-7B": True, "Nemotron-4-15B": True}


def test_who_shards_of_a_project_that_has_no_shards_of_its_own():
    """Accelerate shards by FSDP or DeepSpeed, and the model stays Hugging Face's class."""
    rows = ({"strategy": "full_shard"}, {"strategy": "ZeRO-3"}, {"zero_stage": "2"}, {"strategy": "DDP"}, {})
    found = [case_of(framework="ms-swift", n_gpus="8", **row).step.software for row in rows]
    assert [each.name for each in found] == ["fsdp", "deepspeed", "deepspeed", "huggingface", "huggingface"]
    assert all(each.reference_code for each in found)
    assert case_of(framework="PyTorch", strategy="HYBRID_SHARD", n_gpus="8").step.software.name == "fsdp"


def test_a_program_of_xla_launches_no_layers_whatever_it_is_called():
    for name in ("MaxText", "Paxml, Transformer Engine", "JAX (EasyLM)"):
        step = case_of(framework=name, n_gpus="8").step
        assert (step.software.name, step.software.launch_share, step.layout.zero_stage) == ("jax", 0.0, 3)


def test_scores_are_in_memory_on_a_card_that_no_flash_kernel_is_for():
    gpt = {"n_layers": "16", "hidden": "1536", "n_heads": "16", "ffn": "", "strategy": "DDP"}
    rows = ({"gpu": "V100"}, {"gpu": "A100"}, {"gpu": "V100", "attention": "xformers"})
    assert [case_of(**gpt, **row).step.software.fused_attention for row in rows] == [False, True, True]


def test_hugging_faces_classes_of_gpts_and_berts_had_scores_in_memory_until_2024():
    gpt = {"n_layers": "16", "hidden": "1536", "n_heads": "16", "ffn": "", "framework": "HF Trainer"}
    rows = (
        {"gpu": "A100"},
        {"gpu": "H100"},
        {"gpu": "A100", "attention": "sdpa"},
        {"gpu": "A100", "gated_mlp": "true"},
    )
    found = [case_of(**gpt, **row).step.software.fused_attention for row in rows]
    assert found == [False, True, True, True]


def test_an_update_in_the_backward_of_several_microbatches_is_named():
    found = read_one(optimizer_in_backward="true", micro_batch_size="1", global_batch_seqs="256")
    assert found.case.step.software.updates_in_backward and found.case.step.layout.num_microbatches > 1
    assert any("optimizer_in_backward does nothing" in note for note in found.notes)


def test_flash_attention_2_is_for_gpus():
    gpus = {"A100-80GB": True, "Gaudi2": False, "TPU v5e": False}
    assert {gpu: case_of(gpu=gpu, framework="deepspeed").step.software.flash2 for gpu in gpus} == gpus


BERT = {
    "model": "bert-large",
    "n_layers": None,
    "hidden": None,
    "n_heads": None,
    "vocab": None,
    "seq_len": "384",
}


def test_nvidias_examples_are_apex_on_any_card():
    """Its BERT has attention in separate operators on an A100 too, and is cast as a whole: by autocast it was 40 % too slow."""
    source = "https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/LanguageModeling/BERT"
    rows = ({"framework": "NVIDIA DeepLearningExamples"}, {"strategy": "DDP", "source": source})
    for row in rows:
        software = case_of(**BERT, precision="fp16", **row).step.software
        assert (software.name, software.fused_attention, software.dropout) == ("apex", False, True)
        assert not software.autocast and software.optimizer_bytes == 12


def test_fp32_in_nvidias_containers_goes_by_tf32():
    rows = (
        {"framework": "NVIDIA DeepLearningExamples"},
        {"strategy": "DDP"},
        {"strategy": "DDP", "source": "NGC 23.05"},
    )
    dtypes = [case_of(**BERT, precision="fp32", **row).step.software.compute_dtype for row in rows]
    assert dtypes == ["tf32", "float32", "tf32"]


def test_lamb_moves_more_than_adam():
    adam, lamb = (
        case_of(**BERT, framework="apex", precision="fp16", optimizer=name).step.software.update_passes
        for name in ("adamw_apex_fused", "LAMB")
    )
    assert lamb == pytest.approx((44 + 24) / 28)
    assert adam < lamb


def test_later_generations_of_flash_attention_are_faster_where_they_are_named():
    speeds = [
        case_of(attention=name).step.software.attention_speed
        for name in ("flash", "FA2", "FlashAttention-3", "flash_attention_4", "fa3")
    ]
    assert speeds == [1.0, 1.0, 1.75, 1.7, 1.75]


def test_cudnns_attention_is_as_fast_by_name_as_megatron_core_has_it():
    named = case_of(attention="cuDNN", framework="torchtitan").step.software
    usual = case_of(framework="Megatron-Core").step.software
    speeds = [(each.attention_speed, each.attention_backward_share) for each in (named, usual)]
    assert speeds[0] == speeds[1] == (1.5, 0.8)


def test_a_class_of_hugging_face_has_windows_as_masks_but_with_flash_attention():
    rows = ({}, {"attention": "sdpa"}, {"attention": "flash_attention_2"})
    masked = [case_of(framework="TRL", **row).step.software.masks_windows for row in rows]
    assert masked == [True, True, False]
    assert not case_of(framework="megatron-core").step.software.masks_windows


def test_what_goes_on_under_computation_may_be_said():
    """Megatron's --overlap-grad-reduce and --overlap-param-gather, DeepSpeed's overlap_comm."""
    plain = case_of(framework="NeMo").step.software
    assert (plain.overlap_reduce, plain.overlap_gather) == (True, True)
    said = case_of(framework="NeMo", overlap_grad_reduce="False", overlap_param_gather="no").step.software
    assert (said.overlap_reduce, said.overlap_gather) == (False, False)
    assert not case_of(framework="DeepSpeed", overlap_comm="false").step.software.overlap_reduce
    old = case_of(framework="Megatron-LM v2.5", overlap_grad_reduce="true").step.software
    assert old.overlap_reduce and not old.overlap_gather
    assert read_one(overlap_grad_reduce="sometimes").error is not None


def test_a_gpt_2_of_another_size_is_written_as_gpt_2_is():
    """Its GELU is written out in operators, whatever its shape; of a Llama by that name nothing is known."""
    shape = {"n_layers": "8", "hidden": "768", "n_heads": "12", "ffn": "3072", "framework": "huggingface"}
    assert case_of(model="gpt2", **shape).architecture.reference_code.activation_tensors == 4
    assert case_of(model="gpt2", gated_mlp="true", **shape).architecture.code is None
    assert case_of(model="mine", gated_mlp="false", **shape).architecture.code is None


def test_gradients_stay_between_steps_of_before_torch_2():
    assert case_of(framework="ddp", gpu="A100").step.software.lets_gradients_go
    assert not case_of(framework="ddp", gpu="V100").step.software.lets_gradients_go
    assert not case_of(framework="megatron-core", gpu="A100").step.software.lets_gradients_go
    assert case_of(framework="torchtitan", gpu="H100").step.software.lets_gradients_go


def test_liger_fuses_the_gate_and_rotates_in_place_whoever_shards():
    """Of Hugging Face's classes, which weigh experts in 16 bits and repeat no key for the kernel."""
    plain, liger = (case_of(framework=name, gpu="H100").step.software for name in ("FSDP2", "FSDP2 (Liger)"))
    assert liger.liger and liger.fused_mlp and not liger.repeats_keys and not liger.weighs_experts_wide
    assert not plain.liger and not plain.fused_mlp and plain.repeats_keys and plain.weighs_experts_wide
    page = case_of(framework="FSDP2", gpu="H100", source="github.com/linkedin/Liger-Kernel, README.md")
    assert page.step.software == plain


@pytest.mark.parametrize(
    ("cells", "fused", "compiled", "wide"),
    [
        ({"fused_loss": "true"}, True, False, False),
        ({"fused_loss": "true", "loss_dtype": "fp32"}, True, False, True),
        ({"compile": "model,loss"}, True, True, False),
        ({"compile": "model,loss", "fused_loss": "true"}, True, False, False),
        ({"framework": "InternEvo"}, True, False, True),
        ({"framework": "InternEvo", "loss_dtype": "bf16"}, True, False, False),
    ],
)
def test_a_fused_loss_says_what_it_reads(cells, fused, compiled, wide):
    software = case_of(gpu="H100", **cells).step.software
    found = (software.fused_loss, software.compiled_loss, software.wide_fused_loss)
    assert found == (fused, compiled, wide)


def test_a_vision_transformer_by_name_is_plain_pytorch_s():
    shape = dict.fromkeys(("n_layers", "hidden", "n_heads", "vocab", "seq_len"))
    found = [case_of(**shape, model="ViT-L/16", gpu=gpu).step.software for gpu in ("A100", "V100")]
    assert [(each.name, each.fused_attention, each.dropout) for each in found] == [
        ("ddp", True, False),
        ("ddp", False, False),
    ]


def test_whose_loss_takes_logits_of_16_bits_as_they_are():
    found = [
        case_of(framework="ddp", precision=precision, model_code=code, loss_dtype=dtype).step.software.loss_bytes
        for precision, code, dtype in (
            ("pure bf16", None, None), ("pure bf16", "huggingface", None), ("pure bf16", None, "fp32"), ("bf16", None, None),
        )
    ]  # fmt: skip

    assert found == [2, 4, 4, 4]


def test_an_optimizer_that_is_not_known_is_the_trainers_own():
    found = read_one(framework="ddp", optimizer="GaLore")

    assert found.case.step.software == case_of(framework="ddp").step.software
    assert any("optimizer 'GaLore' is not known" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "zero_stage"),
    [("OLMo-core", 3), ("verl", 3), ("nanoGPT", 0), ("MindSpeed", None), ("Flax", None)],
)
def test_trainers_that_are_others_below(name, zero_stage):
    row = read_one(framework=name, n_gpus="8")
    assert not any("not known" in note for note in row.notes)
    assert zero_stage is None or row.case.step.layout.zero_stage == zero_stage
