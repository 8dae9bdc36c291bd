"""Trainers on torch's own data parallelism, FSDP's and DistributedDataParallel's, and those of fine-tuning that stand on them.

As in software.py, which has them with all others in PRESETS.
"""

from __future__ import annotations

import dataclasses

from memadvisor.software_traits import Preset, Software

FSDP = Preset(
    software=Software(
        name="fsdp",
        stops_early=True,
        dtensors=True,
        leaves_often=True,
        fused_mlp=False,
        fused_rotary=False,
        repeats_keys=True,
        selective="operators",
        whole_in_pipelines=True,
        gathers_narrow=True,
        scales="current",
        casts_again=True,
        offload_gradients=True,
        casts_shards=True,
        logit_bytes=14.0,
        keeps_ends=True,
        weighs_wide=True,
        lets_gradients_go=True,
    ),
    meaning="torch's FSDP or torchtitan: shards in fp32, gathered in bf16, reduced in fp32, 16 B a parameter; selective recomputation is "
    "torchtitan's, operator by operator; keys and values repeated for every query head, norms in one kernel; in a pipeline "
    "parameters stay gathered and gradients whole until the last microbatch, under looped schedules with two parts of the model "
    "on each rank; parameters gathered in the 8 bits of products, whose inputs are kept in 16 and cast again in the backward, by a scale of each tensor (torchao); the embedding and the head are the root unit's, which is not "
    "resharded until the backward's end; of a logit three tensors in fp32 (the log-softmax, the gradient of the "
    "mean, its own), and the block of the product in two bytes, which is too small for any of them; experts' results weighed in fp32; tokens leave their node once for each expert; tensor parallelism's operators go through Python (DTensor) "
    "unless compiled; gradients let go behind each update",
    source="torch.distributed.fsdp.MixedPrecisionPolicy; torch/distributed/tensor/_dispatch.py; torchtitan/distributed/expert_parallel.py (all_to_all_single); torch/distributed/fsdp/flat_param.py (post_unshard frees the 16-bit shard), fully_shard's reshard_after_forward (false for the root); https://github.com/pytorch/torchtitan, docs/fsdp.md, docs/float8.md, torchao/float8/float8_linear.py (matmul_with_hp_or_float8_args) and torchao/prototype/moe_training/mxfp8_linear.py, torchtitan/models/moe.py, its "
    "activation checkpointing and pipelines (reshard_after_forward; generate_split_points: two stages a rank where no split is "
    "given) as of 2024 and 2025",
    names=(
        "fsdp",
        "fsdp1",
        "fsdp2",
        "pytorch-fsdp",
        "fairscale",
        "torchtitan",
        "axolotl",
        "olmo-core",
        "verl",
    ),
    zero_stage=3,
    looped_chunks=2,
    offloads_together=True,
)
LITGPT = Preset(
    software=dataclasses.replace(FSDP.software, name="litgpt", holds_loss=True),
    meaning="as fsdp; a microbatch's loss is held through the next one's forward",
    source="https://github.com/Lightning-AI/litgpt, litgpt/finetune/lora.py, fit (loss is a variable of the loop)",
    names=("litgpt", "lit-gpt", "lit-llama"),
    zero_stage=3,
    looped_chunks=2,
    offloads_together=True,
)
TORCHTUNE = Preset(
    software=dataclasses.replace(
        FSDP.software,
        name="torchtune",
        parameter_bytes=2,
        gradient_bytes=2,
        reduce_bytes=2,
        optimizer_bytes=4,
        linear_loss=True,
        casts_shards=False,
        logit_bytes=None,
        keeps_ends=False,
    ),
    meaning="as fsdp, all of it in bf16, AdamW's moments too: 8 B a parameter; logits and their loss by pieces of the tokens; embedding and "
    "head are units of their own",
    source="https://github.com/pytorch/torchtune, recipes/configs (dtype: bf16; CEWithChunkedOutputLoss since September 2024; "
    "custom_sharded_layers of llama3_1/70B_full.yaml), "
    "recipes/full_finetune_distributed.py",
    names=("torchtune",),
    zero_stage=3,
    offloads_together=True,
)
FSDP_QLORA = Preset(
    software=dataclasses.replace(
        FSDP.software, name="fsdp_qlora", reference_code=True, logit_bytes=None, held_logit_bytes=4.0
    ),
    meaning="Answer.AI's script of QLoRA under FSDP: as fsdp, of Hugging Face's classes, whose outputs are a variable of the loop: logits, "
    "which the class has made fp32, are there through the backward",
    source="https://github.com/AnswerDotAI/fsdp_qlora, train.py (output = None after the step)",
    names=("answer.ai", "answerdotai", "answerdotai/fsdp_qlora"),
    zero_stage=3,
    looped_chunks=2,
    offloads_together=True,
)
DDP = Preset(
    software=Software(
        name="ddp",
        parameter_bytes=4,
        gradient_bytes=4,
        reduce_bytes=4,
        optimizer_bytes=8,
        fused_mlp=False,
        fused_rotary=False,
        takes_views=True,
        returns_logits=True,
        autocast=True,
        bucket_copy_bytes=4,
        update_passes=80 / 28,
        updates_lists=True,
        lets_gradients_go=True,
    ),
    meaning="DistributedDataParallel with autocast: fp32 parameters and gradients, 16 B a parameter; a copy in 16 bits of each "
    "matrix; gradients once more in the reducer's buckets, for gradient_as_bucket_view is off unless asked for; AdamW in torch's kernels "
    "over lists (foreach), which move 80 B of a parameter where a fused one moves 28, and hold one more of its size; a compiled "
    "forward with the loss in it returns the logits beside it; a model that is all in 16 bits gives the loss its logits as they are",
    source="torch.nn.parallel.DistributedDataParallel (gradient_as_bucket_view), torch.autocast; arXiv:2006.15704",
    names=("ddp", "pytorch", "torch", "autocast", "lightning", "fairseq", "nanogpt"),
)
APEX = Preset(
    software=dataclasses.replace(
        DDP.software,
        name="apex",
        compute_dtype="float16",
        parameter_bytes=2,
        gradient_bytes=2,
        reduce_bytes=2,
        optimizer_bytes=12,
        fused_attention=False,
        fused_mlp=True,
        dropout=True,
        takes_views=False,
        autocast=False,
        bucket_copy_bytes=2,
        update_passes=44 / 28,
        updates_lists=False,
        lets_gradients_go=False,
    ),
    meaning="NVIDIA's examples of 2019 to 2023: the whole model in fp16 by apex's O2, softmax too, with a master copy and moments in fp32, 16 B a "
    "parameter; updates move 44 B of one where a bare kernel of Adam's moves 28, for gradients are made fp32 and their norm is taken before, and the master copy is cast behind; attention in separate operators, with dropout",
    source="https://github.com/NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/run_squad.py (amp.initialize, opt_level O2; FusedAdam; "
    "apex.parallel.DistributedDataParallel) and modeling.py (BertSelfAttention, bias_gelu)",
    names=("deeplearningexamples", "apex"),
)
HUGGING_FACE = Preset(
    software=dataclasses.replace(DDP.software, name="huggingface", reference_code=True, masks_windows=True),
    meaning="as ddp, with the model's class of transformers: its Trainer and accelerate, whose fp16 and bf16 are autocast's. transformers 5 "
    "takes a fused AdamW with torch 2.8 and later: name it (adamw_torch_fused)",
    source="https://github.com/huggingface/accelerate, src/accelerate/accelerator.py, prepare_model; "
    "https://github.com/huggingface/transformers, src/transformers/training_args.py (fp16, bf16, default_optim)",
    names=(
        "huggingface",
        "transformers",
        "accelerate",
        "hf-trainer",
        "trl",
        "llama-factory",
        "ms-swift",
        "swift",
        "xtuner",
    ),
)
# Its names beside the first are of its repository: "QLoRA" stands beside many a trainer's.
QLORA = Preset(
    software=dataclasses.replace(
        HUGGING_FACE.software,
        name="qlora",
        autocast=False,
        parameter_bytes=2,
        gradient_bytes=2,
        reduce_bytes=2,
        optimizer_bytes=8,
        paged_bytes=8.0,
        bucket_copy_bytes=2,
        update_passes=1.0,
        updates_lists=False,
    ),
    meaning="the QLoRA paper's own script: Hugging Face's Trainer, with adapters, their gradients and what is not quantised in bf16, and "
    "AdamW's moments in fp32 in memory that the driver moves to the host where the device has no room",
    source="https://github.com/artidoro/qlora, qlora.py (optim paged_adamw_32bit; get_accelerate_model casts adapters, embedding and head "
    "to bf16 again); arXiv:2305.14314, section 3",
    names=("qlora", "guanaco", "artidoro/qlora"),
)
UNSLOTH = Preset(
    software=dataclasses.replace(
        DDP.software, name="unsloth", fused_mlp=True, fused_rotary=True, linear_loss=True
    ),
    meaning="as ddp, with kernels of its own for norms, rotary positions and the gate; logits and their loss by pieces of the tokens; "
    "inputs of recomputed layers on the host",
    source="https://github.com/unslothai/unsloth, unsloth/kernels, and unsloth_zoo/gradient_checkpointing.py (use_gradient_checkpointing="
    "'unsloth', as all of its notebooks have it)",
    names=("unsloth",),
    offloads_recomputed=True,
)
