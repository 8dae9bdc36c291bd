"""What trainers do, as far as memory and time depend on it: presets by name, each with its meaning and its source.

Bytes of states are those of Adam with mixed precision (arXiv:1910.02054, section 3.1) unless a preset says otherwise.
"""

from __future__ import annotations

import dataclasses
import re

from memadvisor.software_torch import (
    APEX,
    DDP,
    FSDP,
    FSDP_QLORA,
    HUGGING_FACE,
    LITGPT,
    QLORA,
    TORCHTUNE,
    UNSLOTH,
)
from memadvisor.software_traits import Preset, Software

# What DeepSpeed's update on the host moves of its 30 B a parameter where a node has several ranks: each has one core where
# torchrun starts them (torch/distributed/run.py sets OMP_NUM_THREADS to 1), and all of them all cores where its own launcher
# does. The median of what six published machines took, 1.3 to 12 GB/s (docs/cost-model.md).
_CPU_ADAM_BYTES_PER_S = 5e9

MODERN = Preset(
    software=Software(),
    meaning="bf16, fused attention, gradients summed and reduced in fp32, reduced under the backward; 18 B a parameter",
    source="Megatron Core, nanotron and torchtitan as of 2024",
    names=("default", "modern"),
)
MEGATRON_CORE = Preset(
    software=Software(
        name="megatron-core",
        fused_accumulation=True,
        tensor_overlap=0.25,
        stage_rule="even",
        attention_speed=1.5,
        attention_backward_share=0.8,
        loss_in_place=True,
        launches_each_expert=True,
        leaves_often=True,
        saves_narrow=True,
        narrow_copy_bytes=2.0,
        weighs_inside=True,
        bucket_elements=40e6,
        bucket_elements_of_replica=1e6,
    ),
    meaning="as default, with the distributed optimizer (ZeRO stage 1) that its recipes switch on, gradients accumulated by "
    "the products that make them, which have half of the backward's collectives of tensor parallelism under them; products of experts launched one by one "
    "(Transformer Engine's GroupedLinear), whose weights of a token multiply inside; tokens leave their node once for each expert (its alltoall; DeepEP and HybridEP by the column dispatcher); products of 8 bits keep their inputs so, and matrices in 8 bits, as they are and transposed; buckets of 40 M elements, or 1 M for each replica",
    source="https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html; "
    "megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication; megatron/core/transformer/moe/experts.py, TEGroupedMLP "
    "(permuted_probs) and transformer_config.py (moe_token_dispatcher_type, moe_enable_deepep); transformer_engine/pytorch/module/linear.py (saved_inputmat) and base.py (get_weight_workspace); megatron/core/distributed/distributed_data_parallel.py (bucket_size)",
    names=("megatron-core", "mcore", "mindspeed"),
    zero_stage=1,
)
NEMO = Preset(
    software=dataclasses.replace(
        MEGATRON_CORE.software,
        name="nemo",
        tensor_overlap=0.5,
        leaves_often=False,
        gradient_bytes=2,
        reduce_bytes=2,
        gathers_narrow=True,
        narrow_copy_bytes=0.0,
        bucket_elements=128 * 2.0**20,
        bucket_elements_of_replica=0.0,
    ),
    meaning="as megatron-core, with tokens for experts leaving their node once for each other node (DeepEP, HybridEP), half of tensor parallelism's collectives in pieces under products (Transformer Engine's "
    "userbuffers), and gradients summed and reduced in 16 bits; 16 B a parameter; of matrices whose products are of 8 bits these alone are "
    "gathered and held, as they are and transposed; buckets of 128 M elements",
    source="recipes of NeMo and Megatron Bridge (scripts/performance: tp_comm_overlap, grad_reduce_in_fp32, grad_sync_dtype, fp8_param_gather); nemo/lightning/pytorch/callbacks/megatron_comm_overlap.py (bucket_size)",
    names=("nemo", "megatron-bridge"),
    zero_stage=1,
)
INTERNEVO = Preset(
    software=Software(
        name="internevo",
        gradient_bytes=2,
        reduce_bytes=2,
        flash2=False,
        fused_mlp=False,
        fused_loss=True,
        wide_fused_loss=True,
        overlap_gather=False,
        update_passes=80 / 28,
        update_held_bytes=12.0,
        joins_gradients=True,
    ),
    meaning="bf16 with gradients summed and reduced in it, 16 B a parameter; FlashAttention's first generation, the gate of the MLP in "
    "separate kernels, a fused loss of fp32 logits; updated parameters sent before the next step begins. For the update gradients are "
    "cast to fp32 (of ZeRO stage 1 joined to one tensor before), and torch's AdamW, which is no fused one before torch 2.1, holds two "
    "tensors of the parameters' size: 12 B of a parameter that the rank updates",
    source="https://github.com/InternLM/InternEvo of 2023, configs/7B_sft.py (overlap_sync_param), internlm/solver/optimizer/hybrid_zero_optim.py "
    "(_step), fsdp_optimizer.py (step) and compatible_adamw.py, internlm/model/losses/ce_loss.py, doc/en/install.md (flash-attention v1.0.5); "
    "torch/optim/adamw.py until 2.0 (_foreach_sqrt and _foreach_add, or sqrt and a division, of one tensor each)",
    names=("internevo", "internlm-train"),
    zero_stage=1,
)
HAI_LLM = Preset(
    software=Software(
        name="hai-llm",
        optimizer_bytes=8,
        attention_speed=1.5,
        saves_narrow=True,
        narrow_activations=True,
        weighs_inside=True,
        repeats_latent=True,
        expert_overlap=True,
        dispatch_bytes=1.0,
    ),
    meaning="DeepSeek-V3's: inputs of products kept in 8 bits, and of SwiGLU, whose result is computed again as norms and latent "
    "attention's up-projections are (its recomputation is pointwise); both moments in 16 bits, 14 B a parameter and 4 more of gradients; tokens go "
    "to their experts in 8 bits, under another microbatch's layers",
    source="arXiv:2412.19437, sections 3.2.1 to 3.2.3 and 3.3.3",
    names=("hai-llm",),
    zero_stage=1,
)
MEGATRON_KWAI = Preset(
    software=dataclasses.replace(
        MEGATRON_CORE.software, name="megatron-kwai", fused_mlp=False, tensor_overlap=0.5
    ),
    meaning="as megatron-core of early 2024, with the gate of the MLP in separate kernels",
    source="https://github.com/kwai/Megatron-Kwai, examples/atc24; that the gate's activation is kept beside its inputs follows "
    "from the memory measured there",
    names=("megatron-kwai",),
    zero_stage=1,
)
NANOTRON = Preset(
    software=Software(
        name="nanotron",
        stage_rule="running",
        fused_mlp=False,
        fused_rotary=False,
        overlap_gather=False,
        call_s=0.13e-3,
        pipelined_call_s=0.3e-3,
        far_call_s=0.45e-3,
        stalled_message_s=0.245,
        stalling_node_chance=0.02,
        ahead_bytes=60.0,
        bucket_bytes=50e6,
        shards_tensors=True,
    ),
    meaning="bf16 with gradients summed in fp32, fused attention, the gate of the MLP in separate kernels; updated "
    "parameters gathered before the next step begins, tensor by tensor; hosts held up by collectives between nodes and by "
    "a pipeline there, on many nodes by each of its messages, and without one so far ahead that buffers of collectives pile up",
    source="https://github.com/huggingface/nanotron, src/nanotron/optim/gradient_accumulator.py, zero.py and "
    "nn/activations.py; delays and buffers are fitted to its published sweep of layouts",
    names=("nanotron", "picotron"),
)
MEGATRON_2021 = Preset(
    software=Software(
        name="megatron-2021",
        compute_dtype="float16",
        fused_attention=False,
        overlap_reduce=False,
        overlap_gather=False,
        overlap_messages=False,
        dropout=True,
        stage_rule="even",
        gradient_bytes=2,
        reduce_bytes=2,
        loss_in_place=True,
        split_loss=True,
    ),
    meaning="Megatron-LM before FlashAttention: scores in memory, dropout, gradients that are summed and reduced in fp16 "
    "after the backward (of bf16 in fp32); 16 B a parameter",
    source="arXiv:2104.04473; arXiv:2205.05198, section 4 (activations) and 6.3 (reduction not overlapped); "
    "megatron/arguments.py (accumulate_allreduce_grads_in_fp32 is bf16's alone); megatron/mpu/cross_entropy.py",
    names=("megatron", "megatron-lm", "megatron-2021", "flagscale"),
    sequence_parallel=False,
)
MEGATRON_DEEPSPEED = Preset(
    software=dataclasses.replace(
        MEGATRON_2021.software,
        name="megatron-deepspeed",
        fused_accumulation=True,
        reduce_bucket_elements=5e8,
        update_gradient_bytes=4,
        host_update_bytes_per_s=_CPU_ADAM_BYTES_PER_S,
    ),
    meaning="as megatron-2021, with DeepSpeed's engine and pipeline: gradients summed and reduced in fp16, 16 B a parameter, by "
    "a bucket, and cast to fp32 for the update; of bf16 kept in it, and summed and reduced in fp32 besides",
    source="https://github.com/microsoft/Megatron-DeepSpeed; arXiv:2312.12391 (vTrain), section 3: reduction after the backward; "
    "deepspeed/runtime/zero/stage_1_and_2.py (reduce_bucket_size, single_grad_partition)",
    names=("megatron-deepspeed", "vtrain"),
    sequence_parallel=False,
)
GPT_NEOX = Preset(
    software=dataclasses.replace(
        MEGATRON_DEEPSPEED.software,
        name="gpt-neox",
        flash2=False,
        fused_rotary=False,
        dropout=False,
        attention_backward_share=0.5,
    ),
    meaning="as megatron-deepspeed, with rotary positions in separate operators, no dropout, and FlashAttention's first generation",
    source="https://github.com/EleutherAI/gpt-neox, megatron/model/transformer.py and positional_embeddings.py as of 2022 and 2023",
    names=("gpt-neox", "neox"),
    zero_stage=1,
    sequence_parallel=False,
)
LLM_FOUNDRY = Preset(
    software=Software(
        name="llm-foundry",
        flash2=False,
        reduce_bytes=2,
        fused_mlp=False,
        fused_rotary=False,
        repeats_keys=True,
        attention_backward_share=0.5,
        logit_bytes=4.0,
        casts_shards=True,
    ),
    meaning="FSDP: shards in fp32, gathered and reduced in bf16 (PURE); DEFAULT reduces in fp32; 16 B a parameter; queries, keys and "
    "values kept once; a fused loss, which holds 16-bit logits and their gradient. Its metrics of a training batch go over the logits "
    "again when the backward is through, in separate kernels: the loss takes the time of those",
    source="https://github.com/mosaicml/composer, composer/trainer/mosaic_fsdp_utils.py, get_mixed_precision; trainer.py, "
    "_eval_train_metrics; https://github.com/mosaicml/llm-foundry, llmfoundry/models/mpt/modeling_mpt.py (loss_fn: fused_crossentropy); "
    "torch/distributed/fsdp/flat_param.py (post_unshard frees the 16-bit shard)",
    names=("llm-foundry", "mosaicml", "composer", "mpt"),
    zero_stage=3,
)
DEEPSPEED = Preset(
    software=Software(
        name="deepspeed",
        gradient_bytes=2,
        reduce_bytes=2,
        fused_mlp=False,
        fused_rotary=False,
        reuse_parameters=1e9,
        reduce_bucket_elements=5e8,
        update_group_elements=1e9,
        offload_gradients=True,
        module_hook_s=0.3e-3,
        host_update_bytes_per_s=_CPU_ADAM_BYTES_PER_S,
        stage_rule="even",
    ),
    meaning="ZeRO: parameters and gradients in 16 bits, master weights and moments in fp32; 16 B a parameter; buckets and "
    "parameters kept for reuse as its configuration has them by default; gradients on the host with the optimizer; hooks of Python "
    "around each module under stage 3; pipeline stages of as many parameters each, both ends counted",
    source="arXiv:1910.02054, section 3.1; arXiv:2101.06840, section 4; https://www.deepspeed.ai/docs/config-json/ "
    "(reduce_bucket_size, stage3_max_reuse_distance); deepspeed/runtime/zero/stage3.py and partitioned_param_coordinator.py; deepspeed/runtime/pipe/module.py (partition_method); what a "
    "hook takes is set by hand (docs/cost-model.md)",
    names=("deepspeed", "zero", "colossalai", "colossal-ai"),
)
JAX = Preset(
    software=Software(
        name="jax",
        stops_early=True,
        flash2=False,
        casts_shards=True,
        gathers_narrow=True,
        fused_loss=True,
        launch_share=0.0,
    ),
    meaning="one program of XLA's for a step, whose pointwise operators are fused: nothing is launched layer by layer, and logits are cast where the loss reads them; "
    "parameters in fp32, sharded (ZeRO stage 3), cast to bf16 and gathered for each layer; 16 B a parameter",
    source="https://github.com/AI-Hypercomputer/maxtext, MaxText/configs/base.yml (weight_dtype float32, dtype bfloat16, fsdp the axis that is sharded over by default) and "
    "train.py (jax.jit of a step); https://openxla.org/xla/architecture (fusion); xla/hlo/transforms/collectives/collective_quantizer.cc (gathers in the 8 bits of products)",
    names=("maxtext", "paxml", "jax", "axlearn", "levanter", "easylm", "t5x", "flax"),
    zero_stage=3,
    sequence_parallel=False,
)
# Of whole projects, whose names stand beside many a trainer's and in many an address.
_OF_PROJECTS = (DDP, HUGGING_FACE)
# Of methods too, which other trainers have as well.
_OF_METHODS = ("qlora",)
PRESETS = (
    MODERN,
    MEGATRON_CORE,
    NEMO,
    INTERNEVO,
    HAI_LLM,
    MEGATRON_KWAI,
    NANOTRON,
    MEGATRON_2021,
    MEGATRON_DEEPSPEED,
    GPT_NEOX,
    LLM_FOUNDRY,
    FSDP,
    LITGPT,
    TORCHTUNE,
    FSDP_QLORA,
    DEEPSPEED,
    DDP,
    APEX,
    HUGGING_FACE,
    QLORA,
    UNSLOTH,
    JAX,
)


def find_preset(name: str) -> Preset | None:
    """The trainer of that name, in any spelling, or the one that the name begins with or holds (`PyTorch FSDP2 + TP`,
    `Megatron-LM v3.0`); None for one that is not known.
    """
    wanted = _plain(name)
    exact = next((preset for preset in PRESETS if wanted in map(_plain, preset.names)), None)
    if exact is not None or not wanted:
        return exact
    inside = [
        (len(_plain(each)), preset)
        for preset in PRESETS
        for each in preset.names
        if _plain(each) in wanted and each not in _OF_METHODS
    ]
    named = [(size, preset) for size, preset in inside if preset not in _OF_PROJECTS]
    return max(named or inside, key=lambda pair: pair[0], default=(0, None))[1]


def names_hugging_face(name: str) -> bool:
    """Whether Hugging Face's classes are trained, whoever shards them: `Accelerate + FSDP`, `HF Trainer, DeepSpeed`, axolotl."""
    word = _plain(name)
    if "unsloth" in word:  # patches them out
        return False
    return name.lower().startswith("hf") or any(
        _plain(each) in word for each in (*HUGGING_FACE.names, "axolotl")
    )


def preset_named_in(text: str) -> Preset | None:
    """The trainer that a source names, a link to its repository for one; the longest name counts. None without any.

    Names of plain data parallelism are those of whole projects, which say little of who trained.
    """
    words = text.lower()
    trainers = [preset for preset in PRESETS if preset not in _OF_PROJECTS]
    found = [
        (len(name), preset) for preset in trainers for name in preset.names if len(name) > 7 and name in words
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
