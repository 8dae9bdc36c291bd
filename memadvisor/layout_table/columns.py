"""The columns that a table of layouts may have: their names, the names that others give them, and what is taken without.

docs/layout-table.md shows this list; a test compares them.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One fact of a layout. `without`: what is taken where the column is absent or a cell empty."""

    name: str
    aliases: tuple[str, ...]
    meaning: str
    without: str


def _column(name: str, aliases: str, meaning: str, without: str) -> Column:
    return Column(name=name, aliases=tuple(aliases.split()), meaning=meaning, without=without)


MODEL = (
    _column("model", "model_name model_type arch architecture model_config model_id base_model model_name_or_path models benchmark workload llm", "name of the model; with no shape beside it, one that `memadvisor estimate --model` knows", "shape columns are needed"),
    _column("n_layers", "num_layers layers n_layer num_hidden_layers number_of_layers n_blocks num_blocks num_transformer_layers layer_num depth", "transformer layers", "those of the named model, as is every shape that the row does not give"),
    _column("hidden", "hidden_size d_model n_embd embed_dim hidden_dim model_dim dim hidden_dimension n_hidden d_hidden width", "width of the residual stream", "that of the named model"),
    _column("n_heads", "num_heads num_attention_heads attention_heads n_head heads number_of_heads n_attention_heads num_q_heads n_q_heads head_num number_of_attention_heads attn_heads", "query heads", "hidden / 128"),
    _column("n_kv_heads", "num_kv_heads num_key_value_heads kv_heads num_query_groups num_kv_groups kv_groups n_kv_groups gqa_groups", "key and value heads", "n_heads"),
    _column("head_dim", "d_head kv_channels", "width of a head", "hidden / n_heads"),
    _column("ffn", "ffn_hidden_size intermediate_size d_ff ffn_hidden ffn_dim mlp_hidden ffn_hidden_dim feed_forward_size ffn_size mlp_dim intermediate_dim d_ffn intermediate", "inner width of the feed-forward block", "4 hidden; of a gated block 8/3 hidden, rounded up to 256"),
    _column("gated_mlp", "gated swiglu glu", "the feed-forward block has three matrices (SwiGLU, GeGLU)", "by the model's name; else the variant whose count is nearer n_params; else gated where ffn is given and is not 4 hidden"),
    _column("vocab", "vocab_size padded_vocab_size n_vocab vocabulary vocabulary_size", "rows of the table of tokens", "of a GPT 50257 padded to a multiple of 128 tp, as Megatron pads; else 32000"),
    _column("tied_embeddings", "tie_word_embeddings tie_embeddings tied tie_weights", "the output projection is the table of tokens", "nearer n_params; else true for a GPT, false where gated"),
    _column("positions", "n_positions learned_positions", "rows of a learned table of positions", "seq_len for a GPT, 0 where gated"),
    _column("biases", "bias use_bias", "linear layers have biases", "true for a GPT, false where gated"),
    _column("causal", "", "a token sees those before it alone", "true; false where the model's name has bert"),
    _column("n_experts", "num_experts num_local_experts experts n_routed_experts", "experts of a layer", "none"),
    _column("experts_per_token", "top_k topk num_experts_per_tok moe_router_topk active_experts num_active_experts activated_experts", "experts that a token passes", "2"),
    _column("expert_ffn", "moe_intermediate_size moe_ffn_hidden_size expert_hidden expert_hidden_size expert_ffn_size moe_ffn", "inner width of an expert", "ffn"),
    _column("shared_ffn", "shared_expert_ffn moe_shared_expert_intermediate_size", "inner width of what all tokens pass beside the experts", "0"),
    _column("first_dense", "first_k_dense_replace num_dense_layers", "layers without experts at the beginning", "expert_every - 1; 0 without it"),
    _column("expert_every", "interleave_moe_layer_step decoder_sparse_step", "each so many-th layer has experts, from first_dense on", "1"),
    _column("encoder_layers", "num_encoder_layers", "of the layers, those of an encoder, which come first; the others then have cross attention", "0; of a named model its own"),
    _column("n_params", "num_params n_parameters num_parameters parameters params total_params model_size param_count parameter_count number_of_parameters model_parameters size", "parameters, to tell variants apart; `6.7B` tells what a number in 10^9 does", "not used"),
    _column("params_b", "param_b model_size_b size_b params_billion n_params_b parameters_b parameters_billion params_in_billions number_of_parameters_billion n_params_billion num_params_b", "the same in 10^9, rounded", "what the model's name says, such as 7b"),
    _column("seq_len", "sequence_length seq_length seqlen seq context_length max_seq_len max_seq_length sequence_len max_length seq_length_tokens context ctx context_len context_window block_size tokens_per_sequence cutoff_len sequence length max_context_length packing_length pack_length packed_length packed_seq_length packed_sequence_length sl", "tokens of a sequence; of an encoder-decoder the source's", "2048; of a vision transformer by name an image's"),
    _column("target_len", "decoder_seq_length max_target_length decoder_seq_len", "tokens of the decoder's sequence, of an encoder-decoder alone", "seq_len"),
)  # fmt: skip

MACHINE = (
    _column("gpu", "accelerator gpu_type gpu_name gpu_model hardware device_name gpus_type chip accelerator_type gpu_arch card device device_type tpu accelerator_name accelerator_model gpus_used card_type instance instance_type machine_type node_type npu npu_type npu_name npu_model hpu hpu_type xpu xpu_type", "the accelerator, by any name of the catalogue", "one that framework, interconnect or source names; A100-80GB"),
    _column("gpu_mem_gb", "device_memory_gb hbm_gb gpu_hbm_gb gpu_memory_capacity hbm_capacity memory_capacity vram_capacity gpu_memory_size", "its memory in GB, or in MiB as tools report it, where the name leaves it open", "as the name says"),
    _column("gpu_power_w", "power_limit_w power_cap_w gpu_tdp_w", "the power that it may take in W, where that is less than as sold: rates go with its cube root", "as sold"),
    _column("gpu_bandwidth_gb_s", "hbm_bandwidth_gb_s memory_bandwidth_gb_s", "bandwidth of its memory in GB/s, where it is another than the data sheet's", "as the name says"),
    _column("n_gpus", "num_gpus world_size gpus ngpus n_devices num_devices total_gpus number_of_gpus num_gpu n_gpu gpu_count gpu_num number_gpus of_gpus devices chips n_chips num_chips n_accelerators num_accelerators num_cards cards total_devices gpu_number npus n_npus tpus number_of_accelerators number_of_chips number_of_cards number_of_devices gpu_counts gpu_total accelerators num_processes hpus n_hpus num_hpus xpus n_xpus gcds n_gcds", "accelerators in all", "dp tp pp cp"),
    _column("nodes", "num_nodes n_nodes nnodes number_of_nodes node_count hosts servers machines instances num_instances n_instances number_of_instances instance_count vms", "nodes", "n_gpus / gpus_per_node"),
    _column("gpus_per_node", "per_node devices_per_node num_gpus_per_node gpus_node gpu_per_node n_gpus_per_node accelerators_per_node trainer_devices", "accelerators of a node; hosts of up to 16 GB200, GB300 or TPUs are parts of a rack or pod", "8 (72 for GB200), or all where they are fewer"),
    _column("interconnect", "network section internode inter_node nic fabric inter_node_network inter_node_bandwidth cluster machine supercomputer platform", "network between nodes and links inside, in words: `NVLink; 4xHDR IB 800 Gb/s per node`, `RoCE 1600 Gbps`, `50 GB/s per gpu`", "the vendor's own node of such cards (docs/clusters.md); 25 GB/s a node where there is none"),
)  # fmt: skip

SPREAD = (
    _column("dp", "data_parallel data_parallel_size dp_size dp_degree data_parallelism dp_replicas", "replicas", "n_gpus / (tp pp cp)"),
    _column("pp", "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size pp_degree pp_gpus pipeline_parallelism n_stages num_stages pipeline_stages pp_stages pp_size_stages pipeline_mp pipeline_model_parallel pipeline_mp_size", "pipeline stages", "1"),
    _column("tp", "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp_size tp_degree mp model_parallel tensor_parallelism tensor_mp tensor_model_parallel mp_size model_parallelism model_parallel_size ici_tensor_parallelism", "ranks that share each matrix", "1"),
    _column("parallelism", "parallel parallel_strategy parallel_config parallel_plan plan parallelization parallelisation parallelization_strategy parallelism_strategy parallelism_config parallel_scheme parallel_degrees parallelism_degrees layout parallel_layout parallel_setup config configuration topology parallel_topology shape mesh device_mesh mesh_shape", "degrees in words, for those that have no column of their own: `TP4 PP2 DP8`, `dp=8,tp=4`, `PP2DP4TP1`, `(TP, PP, DP) = (8, 16, 8)`; and what else describes a run in a phrase: `8 GPUs, ep2, batch 4 x 4096, checkpointing on`, `b4, s4096, GC-off`", "not used"),
    _column("tp_kind", "tensor_kind tensor_parallel_mode", "1d (Megatron's), 2d, 2.5d, 3d: grids of ranks (a square, tp_depth squares, a cube)", "1d"),
    _column("tp_depth", "tensor_depth tesseract_depth", "grids of 2.5d", "1"),
    _column("cp", "context_parallel context_parallel_size cp_size cp_degree context_parallelism ring_degree ring_attention_degree ring", "ranks that share each sequence", "1"),
    _column("ulysses", "ulysses_degree ulysses_size ulysses_parallel_size sp_size sp_degree sequence_parallel_size seq_parallel_size sequence_parallel_degree ds_sequence_parallel_size", "ranks that share each sequence by heads (DeepSpeed-Ulysses): cp of that kind, times `cp` where that is given too; where it is tp, the sequence parallelism of tensor ranks", "1"),
    _column("expert_tensor", "etp expert_tensor_parallel_size expert_tensor_parallel expert_tp", "tensor-parallel ranks that have a part of the same expert each: tp, or 1, so that each has whole experts of its own (Megatron Core)", "tp; 1 where ep is more than there are replicas"),
    _column("ep", "expert_parallel expert_parallel_size expert_model_parallel_size ep_size ep_degree expert_parallelism", "ranks that share the experts", "1"),
    _column("expert_imbalance", "capacity_factor moe_expert_capacity_factor", "tokens of the fullest expert-parallel rank over the mean, or the capacity factor; 1 to ep", "1"),
    _column("shard", "dp_shard hsdp_shard shard_group_size fsdp_size data_parallel_shard_degree fsdp_shard_size fsdp_shards sharding_degree sharded_data_parallel_degree ici_fsdp_parallelism", "replicas among which ZeRO shards", "all; gpus_per_node for HYBRID_SHARD"),
    _column("replicate", "dp_replicate data_parallel_replicate_degree dcn_data_parallelism", "groups of such replicas; dp is shard replicate", "not used"),
    _column("zero_stage", "zero zero_equiv zero_level deepspeed_stage deepspeed_zero_stage zero_optimization_stage sharding_stage zero_dp zero_type ds_stage", "ZeRO stage 0 to 3 (of PaddlePaddle os, os_g, p_g_os)", "of `strategy`; else the trainer's own"),
    _column("fsdp", "use_fsdp fsdp_degree fsdp_config fully_sharded enable_fsdp", "torch's FSDP: yes, a word of `strategy`, or how many replicas share a shard's parameters (`shard`)", "not used"),
    _column("distributed_optimizer", "dist_opt dist_optim dist_optimizer use_distributed_optimizer distributed_optim", "that optimizer state is sharded (ZeRO stage 1), where `zero_stage` is not said", "the trainer's own"),
    _column("zeropp", "zero_plus_plus", "options of ZeRO++, of ZeRO stage 3, with commas: hpz, qwz, qgz (the last two are lossy)", "none"),
    _column("hpz_ranks", "zero_hpz_partition_size hpz_partition_size secondary_shard", "ranks that share hpZ's second copy of the parameters; more than 1 is hpz", "of hpz a node's part of those that share shards"),
    _column("strategy", "sharding_strategy fsdp_strategy sharding method parallel_method training_strategy dp_strategy technique setup distributed distributed_strategy parallel_technique scheme approach deepspeed deepspeed_config techniques methods fsdp_sharding fsdp_sharding_strategy shard_strategy", "a word for it: NO_SHARD or DDP (0), SHARD_GRAD_OP (2), FULL_SHARD or FSDP (3), HYBRID_SHARD or HSDP (3 in groups), ZeRO-1 ...", "zero_stage"),
    _column("micro_batch_size", "mbs microbatch_size micro_batch device_train_microbatch_size per_device_batch_size local_batch_size batch_size_per_gpu micro_bs micro_bsz mini_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size per_gpu_batch_size batch_per_gpu batch_per_device batch_size_gpu batch_size_per_device local_batch local_bs bs_per_gpu device_batch_size per_device_bs mb lbs bs_gpu batch_size_device micro_batch_size_per_gpu mbsz batch_per_replica per_device_batch batch_size_training batch_size_per_rank mbs_gpu mbs_per_gpu", "sequences of a microbatch and replica", "global_batch_seqs / (dp grad_accum); where that is open too, the fastest of 1, 2, 4 ... that fits"),
    _column("grad_accum", "gradient_accumulation_steps gradient_accumulation ga gas n_microbatches num_microbatches microbatches grad_acc grad_acc_steps grad_accum_steps gradient_acc_steps accumulation_steps accumulate_grad_batches accum_steps microbatches_per_step microbatch_count accum", "microbatches of a step and replica", "global_batch_seqs / (dp micro_batch_size), rounded up; where they disagree, the global batch counts"),
    _column("global_batch_seqs", "global_batch_size gbs global_batch train_batch_size global_bs global_batch_sequences total_batch_size effective_batch_size batch_seqs gbsz global_bsz gbs_sequences total_batch", "sequences of a step", "dp micro_batch_size grad_accum"),
    _column("batch_size", "batch bs bsz", "sequences of a step; of a microbatch and replica where there is `grad_accum` beside it (no number of microbatches) and no other size, or more replicas than that", "global_batch_seqs"),
    _column("global_batch_tokens", "tokens_per_step batch_tokens tokens_per_batch tokens_per_iteration tokens_per_iter global_batch_size_tokens global_tokens batch_size_tokens batch_size_in_tokens", "tokens of a step", "global_batch_seqs seq_len"),
    _column("schedule", "pp_schedule pipeline_schedule pp_engine pipeline_type pp_type pipe_schedule", "gpipe, 1f1b (dapple, pipedream-flush), interleaved (1f1b-i), breadth-first, 2bw (pipedream-2bw), chimera, zb-h1, zb-h2, zb-1p, zb-2p, zb-v, dualpipe, dualpipe-v, bpipe", "1f1b; interleaved where there are chunks"),
    _column("chunks", "interleave_v virtual_stages vpp vp virtual_pp virtual_pipeline num_model_chunks virtual_pipeline_model_parallel_size virtual_pp_size vpp_size vp_size vpp_degree virtual_chunks model_chunks n_chunks interleave interleaved_stages virtual_pipeline_size num_virtual_stages n_loop num_loops loops virtual_pipeline_stages interleaving", "parts of the model on each pipeline rank", "1; of an interleaved schedule one layer a part (two parts of torchtitan)"),
    _column("layers_per_virtual_stage", "num_layers_per_virtual_pipeline_stage", "layers of such a part", "by chunks"),
    _column("sequence_parallel", "seq_parallel sp sequence_parallelism megatron_sp tp_sp", "norms and dropout share out tokens among tensor ranks", "the trainer's own"),
    _column("context_kind", "cp_kind cp_comm_type context_parallel_type cp_type sp_type attention_parallel", "ring (p2p) or ulysses (a2a)", "ring"),
    _column("recompute", "act_ckpt act_ckpt_full activation_checkpointing recomputation ckpt checkpointing gradient_checkpointing recompute_granularity activation_recomputation act_recompute activation_recompute recompute_activations activation_checkpoint checkpoint_activations ac ac_mode act_checkpointing act_recomputation activation_ckpt gradient_ckpt grad_ckpt grad_checkpointing use_checkpoint remat rematerialization recompute_mode act_ckpt_mode full_recompute fsdp_activation_checkpointing gc gc_enabled use_gc ac_type remat_policy activation_ckpt_ratio checkpoint_ratio ckpt_ratio recompute_ratio", "none, selective (scores; operator by operator of FSDP and torchtitan), pointwise (norms and the MLP's activation; of JAX minimal and dots_saveable), full (of JAX nothing_saveable); true is full, a number so many layers of each part", "none; full of adapters on a base in 4 or 8 bits of bitsandbytes by peft or where no trainer is named, and of Unsloth's"),
    _column("recompute_method", "activations_checkpoint_method recompute_activation_method", "uniform (all layers, some together) or block (recompute_layers of them), of full recomputation", "all layers"),
    _column("recompute_layers", "recompute_num_layers activations_checkpoint_num_layers act_ckpt_layers activation_recompute_layers num_recompute_layers checkpoint_num_layers num_checkpointed_layers", "layers of each part of the model on a pipeline rank that run again, where that is not all; 1 without a method is Megatron's uniform, all of them", "all"),
    _column("offload", "offloading offloaded offload_device offload_target offload_to zero_offload offload_type", "what is on the host, in words: optimizer, parameters, activations, none; true and cpu are the optimizer, and under ZeRO stage 3 the parameters too", "not used"),
    _column("offload_activations", "offload_alpha act_cpu_offload activation_offload activations_offload cpu_offload_activations activation_offloading activations_offloading act_offload activation_cpuoffload act_cpuoffload", "share of saved activations on the host, 0 to 1; true is 1", "0"),
    _column("offload_optimizer", "optimizer_offload cpu_offload optimizer_cpu_offload optim_offload offload_opt", "optimizer state on the host", "false; with offload_parameters where the trainer has both together (FSDP)"),
    _column("offload_parameters", "param_offload parameter_offload", "parameters on the host", "false; with offload_optimizer where the trainer has both together (FSDP)"),
)  # fmt: skip

CODE = (
    _column("framework", "system software library trainer training_framework codebase training_system training_library", "the trainer (memadvisor/software.py): megatron-lm, megatron-core, nemo, internevo, hai-llm, megatron-deepspeed, gpt-neox, nanotron, llm-foundry, fsdp, torchtitan, litgpt, torchtune, deepspeed, ddp, huggingface, qlora (the paper's script), unsloth, jax (maxtext); with `Liger` in it (`FSDP2 (Liger)`), its kernels of norms, rotary positions and the gate", "llm-foundry with mp_mode; the trainer whose words `strategy` has (fsdp, ddp, ZeRO's of deepspeed); the one that `source` names; Megatron of 2021 for a GPT on V100 or A100; else today's defaults. `megatron-lm` too is that of 2021 for a GPT on V100 or A100 alone"),
    _column("source", "reference url", "where the row is from; a trainer's repository in it says which trainer ran", "none"),
    _column("mp_mode", "", "Composer's word: PURE reduces in 16 bits, DEFAULT in fp32, FULL computes in fp32", "PURE"),
    _column("precision", "dtype mixed_precision data_type training_precision compute_dtype param_dtype numerics data_format train_precision mixed_prec", "bf16, fp16, fp8 (mxfp8, fp8-cs, float8 rowwise), fp4 (nvfp4), tf32, fp32; pure bf16 (bf16-true): parameters, gradients and moments in 16 bits, no master copy; amp_bf16, amp_fp16: torch.autocast over fp32 parameters, as ddp and huggingface always have it with 16 bits; other trainers that are named cast as they do", "the trainer's own; fp16 on a V100"),
    _column("bf16", "use_bf16", "that the precision is bf16: true", "not used"),
    _column("fp16", "use_fp16", "that the precision is fp16: true", "not used"),
    _column("fp8", "use_fp8 float8 use_float8 fp8_format fp8_recipe", "that the precision is fp8: true; rowwise: with a scale for each row", "not used"),
    _column("reduce_dtype", "grad_reduce_dtype reduce_precision gradient_reduce_dtype", "dtype that gradients are reduced in: bf16, fp16, fp32; of Megatron Core, NeMo and Megatron Bridge they are summed in it too", "the trainer's own"),
    _column("no_sync", "defer_reduction", "gradients of a step's microbatches stay whole on each rank, and are reduced with the last (FSDP's no_sync; what Accelerate does)", "false"),
    _column("overlap_reduce", "overlap_grad_reduce overlap_grad_sync overlap_reduction overlap_comm", "gradients are reduced under the backward (Megatron's --overlap-grad-reduce, DeepSpeed's overlap_comm)", "the trainer's own"),
    _column("overlap_gather", "overlap_param_gather overlap_param_sync", "parameters are gathered under the forward (Megatron's --overlap-param-gather)", "the trainer's own"),
    _column("tensor_overlap", "tp_comm_overlap async_tp async_tensor_parallel", "share of tensor parallelism's collectives that goes on under products, 0 to 1; true is 0.5", "the trainer's own"),
    _column("expert_overlap", "moe_a2a_overlap overlap_moe_expert_parallel_comm", "exchanges of experts go on under another microbatch's layers", "false"),
    _column("pad_experts", "moe_pad_expert_input_to_capacity pad_expert_input padded_experts drop_and_pad", "each expert gets its capacity of tokens, padded where it has fewer: the host need not wait for their number", "false"),
    _column("experts_in_turn", "fake_balanced_gate moe_fake_balanced_gate", "tokens are given experts in turn and not by a router (NeMo AutoModel's fake_balanced_gate): those of one token follow each other, on few ranks of one node", "false"),
    _column("dispatcher", "moe_token_dispatcher_type token_dispatcher moe_flex_dispatcher_backend ep_backend", "who sends tokens to their experts: deepep, hybridep or flex send one once to each rank that has experts of it; any other, alltoall for one, once for each expert, also between nodes", "once for each expert; between nodes once for each node, of Megatron Core and torch's FSDP for each expert"),
    _column("experts_implementation", "experts_impl experts_kernel moe_kernel", "how Hugging Face's classes go about a rank's experts: eager, one by one in a loop over stacked weights (GraniteMoe's of 2024; all of transformers 5 with torch before 2.9), or grouped_mm, scattermoe and other kernels for all of them", "grouped_mm"),
    _column("dispatch_dtype", "moe_dispatch_dtype", "dtype that tokens go to their experts in: fp8, bf16, fp16; they come back in 16 bits", "bf16"),
    _column("cuda_graphs", "cuda_graph cuda_graph_scope enable_cuda_graph", "launches are replayed from CUDA graphs: true (full), or those of parts of a layer: attn, moe_router, moe (mlp)", "false"),
    _column("fused_loss", "fused_cross_entropy cross_entropy_fusion", "the loss is one kernel over 16-bit logits, which become their gradient (over a copy in fp32 where `loss_dtype` is fp32); of Megatron's own fusion, which has a softmax in fp32, fewer kernels", "false"),
    _column("linear_loss", "liger fused_linear_cross_entropy cut_cross_entropy chunked_loss fused_linear_ce liger_kernel use_liger use_liger_kernel enable_liger_kernel liger_loss", "the head's product and the loss go by pieces of the tokens, and logits are never whole (Liger, torchtune)", "the trainer's own"),
    _column("loss_dtype", "cross_entropy_dtype logits_dtype", "dtype of the cross entropy: fp32 (of a copy of the logits), or bf16, fp16 (of the logits as they are: F.cross_entropy without a cast or autocast)", "fp32"),
    _column("loss_parallel", "vocab_parallel_loss", "tensor-parallel ranks share out the loss with the vocabulary; else each has all logits", "true"),
    _column("attention", "attn attn_impl attention_impl flash_attention flash_attn use_flash_attn flash use_flash_attention attention_kernel attention_backend attn_kernel attn_backend fused_attention sdpa kernel", "flash (fused, sdpa, triton, true; its generations by name: FA2, FA3, flash_attention_4) or unfused (eager, math, torch, false)", "the trainer's own"),
    _column("sample_len", "packed_sample_len document_len doc_len mean_document_len", "sequences are packs of samples, each of which sees itself alone: tokens of the sample that a token is in, on average over tokens (the sum of squared lengths over their sum)", "seq_len"),
    _column("model_code", "modeling model_implementation", "reference (huggingface, transformers): the model is Hugging Face's class of it, operator by operator, with its dropouts; fused: the trainer's own code", "fused"),
    _column("dropout", "", "there is dropout", "the trainer's own"),
    _column("compile", "torch_compile compiled use_torch_compile use_compile", "torch.compile fuses what is pointwise; `model,loss` and `loss`: the loss too", "the trainer's own"),
    _column("peft", "finetuning_type tuning_type sft_type train_type tuner tuning_method finetuning_method finetune_method use_peft adapter adapters fine_tuning finetuning fine_tuning_type fine_tuning_method ft_method", "lora or qlora: adapters beside frozen matrices are trained (arXiv:2106.09685); full: all parameters are", "lora where there is a rank; else as `strategy` or `framework` says; else full"),
    _column("lora_rank", "lora_r lora_dim rank adapter_rank peft_rank", "columns of an adapter's first matrix", "8"),
    _column("lora_targets", "lora_target lora_target_modules target_modules lora_modules lora_layers", "matrices with adapters, with commas: query, key, value, output, gate, up, down (qkv of one product; or by their names in trainers, q_proj for one), attention, mlp, all", "query, value; all beside a base in 4 bits"),
    _column("lora_dropout", "adapter_dropout", "there is dropout before the adapters", "false"),
    _column("base_precision", "quantization quantisation quantization_bit quantization_bits quant quantize quantized_base bits base_dtype base_quantization load_in_4bit bnb", "what frozen matrices are held in: 16bit, fp32, int8, nf4, nf4-dq (double quantisation; 4, qlora), int4 (GPTQ, AWQ)", "16bit; nf4-dq of qlora"),
    _column("trained_modules", "modules_to_save trainable_modules", "embeddings: copies of the embedding and the head are trained beside the adapters", "none"),
    _column("bitsandbytes_version", "bnb_version", "release of bitsandbytes: until 0.43.2 its products of 4 bits kept their inputs (0.42.0, <0.43.2)", "a later one"),
    _column("optimizer", "optim optimizer_name", "adamw, adam8bit, adam4bit, adafactor, sgd, momentum, lion, muon, lamb, adagrad and others (adan, sophia, rmsprop, adam-mini, lomo), in any words (`AdamW (fused)`, `bnb 8-bit AdamW`); of several the first; one that is not known is the trainer's own, as the note says; paged_adamw_32bit, paged_adamw_8bit (bitsandbytes'): its state goes to the host where the device has no room", "adamw"),
    _column("optimizer_in_backward", "optimizer_in_bwd fused_backward update_in_backward", "each gradient updates its parameter at once, and is let go; with one microbatch", "false"),
)  # fmt: skip

COLUMNS: tuple[Column, ...] = MODEL + MACHINE + SPREAD + CODE


def plain(name: str) -> str:
    """A header, or a word, without case, blanks and punctuation: `Hidden Size` and `hidden_size` are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


# The letters of arXiv:2104.04473, section 2 and 3, as a whole header; of these alone the case counts.
LETTERS = {
    "p": "pp", "t": "tp", "d": "dp", "b": "micro_batch_size", "B": "global_batch_seqs", "m": "grad_accum", "n": "n_gpus", "s": "seq_len",
    "h": "hidden", "a": "n_heads", "l": "n_layers", "L": "n_layers", "V": "vocab", "v": "chunks",
}  # fmt: skip

# What may stand behind a header without making it another: a symbol, or what is counted.
_SYMBOL = re.compile(
    r"[(\[]\s*(?:[abBdhlmnpstTvV#]|tokens|seqs|sequences|samples|instances|GB|GPUs)\s*[)\]]\s*$", re.ASCII
)
_OF_TOKENS = ("global_batch_seqs", "batch_size")
_COUNTED = re.compile(r"^(?:number|num|no)?of")


def named(header: str) -> str:
    """The plain name of a header: as it stands where that is known, else without a symbol behind it (`Hidden size (h)`) and
    without words for a number before it (`No. of layers`)."""
    for plural in ("s", "es"):  # `#GPU`, `# layer`, `# micro-batch`
        if header.lstrip().startswith("#") and plain(header) + plural in NAMES:
            return plain(header) + plural
    bare = plain(_SYMBOL.sub("", header))
    column, unit = NAMES.get(bare), plain(header)[len(bare) :]
    if (column, unit) == ("n_params", "gb"):  # of bytes
        return plain(header)
    if column in _OF_TOKENS and unit in ("tokens", "t"):
        return "globalbatchtokens"
    spellings = [plain(header), bare]
    spellings += [_COUNTED.sub("", spelling) for spelling in spellings]
    return next((spelling for spelling in spellings if spelling in NAMES), spellings[0])


# Words that tell no column from another, and other spellings of those that do.
_NO_WORDS = frozenset((
    "number", "num", "no", "nb", "of", "n", "the", "total", "size", "sizes", "degree", "degrees", "count", "per",
    "in", "each", "using", "used", "use", "enable", "enabled", "way", "ways",
))  # fmt: skip
_SPELLED = {
    "gpus": "gpu", "nodes": "node", "layer": "layers", "head": "heads", "microbatch": "micro", "seqlen": "seq", "sequence": "seq",
    "length": "len", "bs": "batch", "bsz": "batch", "acc": "accum", "accumulation": "accum", "grad": "gradient", "devices": "gpu",
    "device": "gpu", "parallelism": "parallel", "activations": "activation", "act": "activation", "ckpt": "checkpointing",
    "checkpoint": "checkpointing", "recomputation": "recompute", "parameters": "params", "parameter": "params", "stages": "stage",
    "accelerators": "gpu", "accelerator": "gpu", "chips": "gpu", "steps": "step",
}  # fmt: skip
# Words that say enough by themselves; other single ones (`ckpt size`, `number of samples`) may be of something else.
_ALONE = frozenset((
    "dp", "tp", "mp", "pp", "cp", "ep", "vpp", "vp", "mbs", "gbs", "lbs", "gas", "heads", "layers", "experts",
    "chunks", "vocab", "hidden", "zero", "fp8", "float8", "compile", "attention",
))  # fmt: skip
# Of these a word more or less makes another quantity: a measured peak, for one.
AS_THEY_STAND = ("gpu", "gpu_mem_gb", "gpu_power_w", "gpu_bandwidth_gb_s", "source", "model", "strategy")


_LONG = 14  # letters of a name that a slip leaves recognisable


def _words(header: str) -> frozenset[str]:
    words = re.findall(r"[a-z0-9]+", header.lower().replace("micro-batch", "micro batch"))
    return frozenset(_SPELLED.get(word, word) for word in words if word not in _NO_WORDS)


def by_words(header: str) -> str | None:
    """The column one of whose names has the same words in any order, without those that only count; None where there is none,
    or several."""
    columns = _BY_WORDS.get(_words(header), frozenset())
    return next(iter(columns)) if len(columns) == 1 else _misspelled(header)


def _misspelled(header: str) -> str | None:
    """The column that a long name is meant for but for a letter or two (`Activation checkpoiting`)."""
    word = plain(header)
    if len(word) < _LONG:
        return None
    near = difflib.get_close_matches(word, [name for name in NAMES if len(name) >= _LONG], n=1, cutoff=0.95)
    return NAMES[near[0]] if near and NAMES[near[0]] not in AS_THEY_STAND else None


NAMES = {plain(name): column.name for column in COLUMNS for name in (column.name, *column.aliases)}
# Of several headers for one column, the earlier of these has the say.
ORDER = {
    plain(name): order for column in COLUMNS for order, name in enumerate((column.name, *column.aliases))
}


def _columns_by_words() -> dict[frozenset[str], frozenset[str]]:
    found: dict[frozenset[str], frozenset[str]] = {}
    for column in COLUMNS:
        for name in (column.name, *column.aliases):
            words = _words(name)
            if len(words) > 1 or (words and words <= _ALONE):
                found[words] = found.get(words, frozenset()) | {column.name}
    return {words: columns for words, columns in found.items() if not columns & set(AS_THEY_STAND)}


_BY_WORDS = _columns_by_words()
