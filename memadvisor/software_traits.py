"""How training code goes about a step, as far as memory and time depend on it: pure data, checked on construction.

Presets of trainers are in software.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.errors import UsageError
from memadvisor.lora import Lora

SELECTIVE = ("scores", "operators")
NARROW = ("float8", "float4")  # dtypes of products whose operands come in 16 bits and are cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The defaults are those of today's trainers: bf16, fused attention, gradients accumulated in fp32, collectives under
    the backward."""

    name: str = "default"
    compute_dtype: str = "bfloat16"
    # Of a parameter as it is computed with (of one under `autocast` as it is held).
    parameter_bytes: int = 2
    # Of a gradient as it is accumulated.
    gradient_bytes: int = 4
    # Of a gradient's element on the wire.
    reduce_bytes: int = 4
    # Of all state that the optimizer keeps of a parameter, its master copy included.
    optimizer_bytes: int = 12
    # Scores never reach memory.
    fused_attention: bool = True
    # The gate's activation and product are one kernel that keeps its inputs alone.
    fused_mlp: bool = True
    # Queries, keys and values are kept once; else rotary positions and changes of shape leave copies of them.
    fused_rotary: bool = True
    # Without `fused_rotary`: keys and values are kept once, repeated for every query head, as are queries.
    repeats_keys: bool = False
    # Without it: where nothing rotates them, queries, keys and values are kept once too, as views of their product, which
    # torch's scaled_dot_product_attention takes.
    takes_views: bool = False
    # Products of gradients add to what is accumulated.
    fused_accumulation: bool = False
    # Share of the collectives of tensor parallelism that goes on under products.
    tensor_overlap: float = 0.0
    # Gradients are reduced under the backward, parameters gathered under the computation.
    overlap_reduce: bool = True
    overlap_gather: bool = True
    # Tensor parallelism is torch's own, whose operators are sent through Python one by one (cost/layouts/dtensor_dispatch.py).
    dtensors: bool = False
    # A pipeline's devices compute while they send and receive.
    overlap_messages: bool = True
    dropout: bool = False
    # How layers are dealt out to pipeline stages: `balanced` (the dearest stage is as cheap as can be, the head
    # counted), `even` (equal numbers) or `running` (each takes layers until its share of the whole cost is passed).
    stage_rule: str = "balanced"
    # How much of gradients (of parameters, where they are gathered once a step) goes in one collective.
    bucket_bytes: float = 100e6
    # The same in elements where a trainer's code has it so: the larger of `bucket_elements` and so many for each replica;
    # all at once where gradients are not reduced under the backward. None: by `bucket_bytes`.
    bucket_elements: float | None = None
    bucket_elements_of_replica: float = 0.0
    # Each tensor is sharded, so that each has its own collective.
    shards_tensors: bool = False
    # What a collective of tensor parallelism costs the host beyond what torch takes to launch it.
    call_s: float = 0.0
    # What such a collective costs more, for each of its ranks, while a pipeline's messages cross nodes.
    pipelined_call_s: float = 0.0
    # By how much such a collective is longer, for the host and the device, for each further node that its ranks are on.
    far_call_s: float = 0.0
    # What a pipeline's message takes more in jobs that are held up, and the chance of each node to hold up a job
    # (cost/layouts/stalls.py).
    stalled_message_s: float = 0.0
    stalling_node_chance: float = 0.0
    # What collectives of tensor parallelism hold, of each element of the whole residual stream, where no pipeline
    # keeps the host from running ahead.
    ahead_bytes: float = 0.0
    # The model is Hugging Face's class, operator by operator (`Architecture.reference_code`), which then says what is
    # kept in place of `fused_mlp`, `fused_rotary` and `dropout`.
    reference_code: bool = False
    # Kernels of others, or torch.compile's, take the place of that class's norms, rotary positions and gate.
    patched_code: bool = False
    # It has Liger's kernels for norms, rotary positions and the gate, whoever shards it.
    liger: bool = False
    # How many parameters may come between two uses of one for ZeRO stage 3 to keep it gathered.
    reuse_parameters: float = 0.0
    reduce_bucket_elements: float = 0.0
    # ZeRO stage 3 gathers what is in no layer, the embedding and the head, as one unit, which stays until the backward's end.
    keeps_ends: bool = False
    # With the optimizer's state on the host, gradients go there as they are made, by a bucket of
    # `reduce_bucket_elements`.
    offload_gradients: bool = False
    # What selective recomputation means there: `scores` (attention's core, Korthikanti et al. 2022; nothing where
    # attention is fused) or `operators` (torchtitan's, see cost/layouts/operators.py).
    selective: str = "scores"
    # A layer that runs again as a whole stops before its last product, whose result nobody's backward asks for.
    stops_early: bool = False
    # Parameters are in fp32 and torch.autocast casts the operands of each product to two bytes
    # (cost/layouts/saved_autocast.py).
    autocast: bool = False
    # Of a parameter's gradient in the buckets that plain data parallelism reduces, beside the gradient itself.
    bucket_copy_bytes: int = 0
    # Of fused attention on cards from Hopper on, over FlashAttention 2.
    attention_speed: float = 1.0
    # Its kernels have an older card's instructions, so that a card newer than Hopper is no faster with them than Hopper is.
    attention_as_on_hopper: bool = False
    # Of its forward's rate that its backward reaches, where the kernels are others than those that the coefficient of
    # that name describes.
    attention_backward_share: float | None = None
    # Fused attention is FlashAttention's second generation, and not its first or another program's.
    flash2: bool = True
    # The loss is one kernel over 16-bit logits, which become their gradient.
    fused_loss: bool = False
    # torch.compile makes that kernel, which writes the gradient beside the logits.
    compiled_loss: bool = False
    # A compiled forward returns the logits beside the loss, as nanoGPT's, and gets a gradient of zeros for them.
    returns_logits: bool = False
    # That kernel takes a copy of the logits in fp32.
    wide_fused_loss: bool = False
    # Of a logit at the loss's peak, where it is another.
    logit_bytes: float | None = None
    # Of a logit that is there through the backward beside those of the loss: the loop has the model's outputs in a variable.
    held_logit_bytes: float = 0.0
    # Shards of ZeRO stage 3 are the fp32 copies, cast for each gather.
    casts_shards: bool = False
    # The head's product and the loss go by pieces of the tokens, so that logits are never whole.
    linear_loss: bool = False
    # What an update moves, over one fused kernel's.
    update_passes: float = 1.0
    # An update goes by kernels over lists of tensors, and holds one more of each parameter's size meanwhile.
    updates_lists: bool = False
    # The cross entropy's softmax takes the place of the fp32 copy of the logits.
    loss_in_place: bool = False
    # Each part of the cross entropy is an operator of its own, as in Megatron's function over parts of the vocabulary.
    split_loss: bool = False
    # Of a logit as a cross entropy of separate kernels takes it: 4 where logits are cast to fp32 for it, 2 where it
    # takes those of two bytes as they are.
    loss_bytes: int = 4
    # ZeRO stages 2 and 3 keep whole gradients of a step's microbatches, and reduce them with the last (FSDP's
    # no_sync).
    defers_reduction: bool = False
    # In a pipeline they do so too, where parameters stay gathered as well, from a step's first microbatch to its last.
    whole_in_pipelines: bool = False
    # It gathers parameters in the 8 bits of products that take these.
    gathers_narrow: bool = False
    # What has a scale of operands of fewer than 16 bits: `delayed` (a tensor, by its largest element of steps before), `current`
    # (by that of now), `rows` (each row; torchao's rowwise), `blocks` (of 32 elements, MX, or more) or `blocks-of-tensor`
    # (of 16, with one of the tensor besides, NVFP4).
    scales: str = "delayed"
    # Operands of 8 bits are written transposed too, and matrices kept so (cost/layouts/transposes.py).
    transposes: bool = True
    # Products keep their inputs in 16 bits, and cast them again in the backward (torchao).
    casts_again: bool = False
    # Tensor-parallel ranks share out the loss with the vocabulary; else each has all logits.
    loss_parallel: bool = True
    # Of the gradient of each parameter that a rank updates, cast for it under ZeRO stages 1 and 2.
    update_gradient_bytes: int = 0
    # Under ZeRO stage 3 an update goes by groups of about so many of a rank's parameters, whose gradients are joined and
    # cast to fp32 for it.
    update_group_elements: float = 0.0
    # Of a parameter that a rank updates, what its update holds beside the states: gradients cast to fp32, tensors between operators.
    update_held_bytes: float = 0.0
    # Under ZeRO stages 0 to 2 the update joins a rank's 16-bit gradients to one tensor, casts that, and lets both go.
    joins_gradients: bool = False
    # Of a layer's launches, those that the host makes; the others are replayed from CUDA graphs.
    launch_share: float = 1.0
    # What an update of state on the host moves a second for each of several ranks; a rank alone moves a share of eight in a
    # server's 200 GB/s.
    host_update_bytes_per_s: float = 25e9
    # What the host takes of each module under ZeRO stage 3 (cost/layouts/module_hooks.py).
    module_hook_s: float = 0.0
    # Exchanges of experts go on under another microbatch's layers.
    expert_overlap: bool = False
    # Products of a rank's experts are launched one by one, and so are the casts of what comes into them.
    launches_each_expert: bool = False
    # Experts are gone through one by one, each a part of stacked weights (Hugging Face's eager experts).
    loops_experts: bool = False
    # Each expert gets as many tokens, of which some may be padding, so that the host need not read how many.
    pads_experts: bool = False
    # Tokens are given experts in turn, each so many that follow one another, in place of those that a router would choose.
    experts_in_turn: bool = False
    # A token goes once to each rank that has experts of it, and comes back as their sum (DeepEP); else once for each expert.
    sends_once: bool = False
    # What goes to several experts of another node leaves for it as often (a plain all-to-all); else once for each node.
    leaves_often: bool = False
    # Of an element of a token on its way to its experts; it comes back in two.
    dispatch_bytes: float = 2.0
    # Products of fewer than 16 bits keep their inputs as they were cast for them.
    saves_narrow: bool = False
    # Of an element of a layer's matrix, in casts kept beside it.
    narrow_copy_bytes: float = 0.0
    # The gate keeps its inputs in one byte and not its result, attention's is kept once, in 12 bits
    # (arXiv:2412.19437, section 3.3.3).
    narrow_activations: bool = False
    # Tensor-parallel ranks have experts of their own in place of a part of each: `Layout.expert` times as many share them.
    whole_experts: bool = False
    # A token is weighed between its expert's two products, whose result is not kept.
    weighs_inside: bool = False
    # Results of experts are weighed in fp32, outside of any kernel of theirs.
    weighs_wide: bool = False
    # Pointwise recomputation has latent attention's queries, keys and values too.
    repeats_latent: bool = False
    # The loop still holds a microbatch's loss while the next one's forward runs, and with it what autograd functions keep
    # beside their saved tensors.
    holds_loss: bool = False
    # Of `optimizer_bytes`, those in memory that the driver moves to the host where the device has no room (bitsandbytes'
    # paged optimizers), which torch's allocator does not count.
    paged_bytes: float = 0.0
    # A gradient updates its parameter as soon as it is there, and is let go.
    updates_in_backward: bool = False
    # The loop lets gradients go behind each update (torch's zero_grad, which sets them to None), so that a step's first backward
    # finds none.
    lets_gradients_go: bool = False
    # Sequences are packs of samples, and attention is that of each sample alone: how many tokens the sample of a token has, on
    # average over tokens; None where all tokens of a sequence see those before them.
    sample_len: int | None = None
    # Windows of attention are a mask's, and what it leaves out is computed all the same (torch's scaled_dot_product_attention).
    masks_windows: bool = False
    # Adapters alone are trained, and states are of them; None where all are.
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.selective not in SELECTIVE:
            raise UsageError(
                f"selective recomputation is {self.selective!r}.",
                hint=f"it is one of {', '.join(SELECTIVE)}.",
            )
        if self.sample_len is not None and self.sample_len < 1:
            raise UsageError(f"samples have {self.sample_len} tokens.", hint="it is at least 1.")

    @property
    def is_narrow(self) -> bool:
        """Products have operands of fewer than 16 bits."""
        return self.compute_dtype.startswith(NARROW)

    @property
    def keeps_narrow(self) -> bool:
        """Inputs of products are kept in fewer than 16 bits; adapters read them as they were."""
        return self.saves_narrow and self.is_narrow and self.lora is None

    @property
    def weighs_experts_wide(self) -> bool:
        """Hugging Face's classes weigh experts' results in two bytes."""
        return self.weighs_wide and not self.weighs_inside and not self.reference_code

    @property
    def saved_input_bytes(self) -> float:
        """Of an element of such an input; in four bits with a scale of a byte for each 16 of them (NVFP4)."""
        return self.narrow_bytes if self.keeps_narrow else 2.0

    @property
    def narrow_bytes(self) -> float:
        """Of an element of an operand of fewer than 16 bits, with its scales."""
        return 0.5625 if self.compute_dtype.startswith("float4") else 1.0

    @property
    def element_bytes(self) -> float:
        """Of an element of activations: four where products take fp32 or TF32, and nothing casts; beside adapters always two."""
        is_wide = self.compute_dtype in ("float32", "tf32") and not self.autocast and self.lora is None
        return 4.0 if is_wide else 2.0

    def seen_len(self, seq_len: int) -> int:
        """Of a sequence's tokens, how many there are beside each other in attention."""
        return seq_len if self.sample_len is None else min(seq_len, self.sample_len)

    @property
    def has_selective(self) -> bool:
        """Selective recomputation changes something: fused attention keeps no scores that could be computed again."""
        return self.selective == "operators" or not self.fused_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A trainer. `zero_stage` and `sequence_parallel` (with tensor parallelism) are what it does unless told otherwise,
    and `looped_chunks` on each rank under interleaved and breadth-first schedules (None: one layer each).
    `offloads_together`: the optimizer's state goes to the host with the parameters, or not at all. `offloads_recomputed`:
    inputs of layers that run again wait on the host."""

    software: Software
    meaning: str
    source: str
    names: tuple[str, ...]
    zero_stage: int = 0
    sequence_parallel: bool = True
    looped_chunks: int | None = None
    offloads_together: bool = False
    offloads_recomputed: bool = False

    def chunks_of(self, most: int) -> int:
        """Of a looped schedule where nothing is said of them; `most` are of one layer each."""
        return most if self.looped_chunks is None else min(self.looped_chunks, most)
