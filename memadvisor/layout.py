"""How a training step is spread over accelerators, and what it does: pure data, checked on construction.

Ranks are numbered as Megatron and nanotron do: tensor innermost, then context, data, pipeline outermost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from memadvisor.errors import UsageError
from memadvisor.lora import Lora

STAGE_RULES = ("balanced", "even", "running")
TENSOR_KINDS = ("1d", "2d", "2.5d", "3d")
RECOMPUTE = ("none", "selective", "pointwise", "full")
SELECTIVE = ("scores", "operators")
ZEROPP = ("hpz", "qwz", "qgz")
NARROW = ("float8", "float4")  # dtypes of products whose operands come in 16 bits and are cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How the training code goes about it, as far as memory and time depend on it. The defaults are those of today's
    trainers (bf16, fused attention, gradients accumulated in fp32, collectives under the backward).

    `parameter_bytes`: of a parameter as it is computed with (of one under `autocast` as it is held). `gradient_bytes`: of
    a gradient as it is accumulated. `optimizer_bytes`: of all state that the optimizer keeps of a parameter, its master
    copy included. `reduce_bytes`: of a gradient's element on the wire. `fused_attention`: scores never reach memory.
    `fused_mlp`: the gate's activation and product are one kernel that keeps its inputs alone. `fused_rotary`: queries,
    keys and values are kept once; else rotary positions and changes of shape leave copies of them, where not
    `repeats_keys`: keys and values are kept once, repeated for every query head, as are queries. `fused_accumulation`:
    products of gradients add to what is accumulated. `tensor_overlap`: share of the collectives of tensor parallelism
    that goes on under products. `overlap_reduce`, `overlap_gather`: gradients are reduced under the backward, parameters
    gathered under the computation. `stage_rule`: how layers are dealt out to pipeline stages: `balanced` (the dearest
    stage is as cheap as can be, the head counted), `even` (equal numbers) or `running` (each takes layers until its share
    of the whole cost is passed). `overlap_messages`: a pipeline's devices compute while they send and receive.
    `bucket_bytes`: how much of gradients (of parameters, where they are gathered once a step) goes in one collective;
    `shards_tensors`: each tensor is sharded, so that each has its own. `call_s`: what a collective of tensor parallelism
    costs the host beyond what torch takes to launch it. `pipelined_call_s`: what it costs more, for each of its ranks,
    while a pipeline's messages cross nodes. `far_call_s`: by how much it is longer, for the host and the device, for each
    further node that its ranks are on. `stalled_message_s`, `stalling_node_chance`: what a pipeline's message takes more
    in jobs that are held up, and the chance of each node to hold up a job (cost/layouts/stalls.py). `ahead_bytes`: what
    collectives of tensor parallelism hold, of each element of the whole residual stream, where no pipeline keeps the host
    from running ahead. `reference_code`: the model is Hugging Face's class, operator by operator
    (`Architecture.reference_code`), which then says what is kept in place of `fused_mlp`, `fused_rotary` and `dropout`.
    `reuse_parameters`: how many parameters may come between two uses of one for ZeRO stage 3 to keep it gathered.
    `offload_gradients`: with the optimizer's state on the host, gradients go there as they are made, by a bucket of
    `reduce_bucket_elements`. `selective`: what selective recomputation means there: `scores` (attention's core,
    Korthikanti et al. 2022; nothing where attention is fused) or `operators` (torchtitan's, see
    cost/layouts/operators.py). `autocast`: parameters are in fp32 and torch.autocast casts the operands of each product
    to two bytes (cost/layouts/saved_autocast.py). `bucket_copy_bytes`: of a parameter's gradient in the buckets that
    plain data parallelism reduces, beside the gradient itself. `attention_speed`: of fused attention on cards from Hopper
    on, over FlashAttention 2. `attention_backward_share`: of its forward's rate that its backward reaches, where the
    kernels are others than those that the coefficient of that name describes. `fused_loss`: the loss is one kernel over
    16-bit logits, which become their gradient. `loss_bytes`: of a logit as a cross entropy of separate kernels takes it:
    4 where logits are cast to fp32 for it, 2 where it takes those of two bytes as they are. `defers_reduction`: ZeRO
    stages 2 and 3 keep whole gradients of a step's microbatches, and reduce them with the last (FSDP's no_sync).
    `whole_in_pipelines`: so they do in a pipeline, where parameters stay gathered too, from a step's first microbatch to
    its last. `gathers_narrow`: it gathers parameters in the 8 bits of products that take these. `loss_parallel`:
    tensor-parallel ranks share out the loss with the vocabulary; else each has all logits. `update_gradient_bytes`: of
    the gradient of each parameter that a rank updates, cast for it under ZeRO stages 1 and 2. `launch_share`: of a
    layer's launches, those that the host makes; the others are replayed from CUDA graphs. `module_hook_s`: what the host
    takes of each module under ZeRO stage 3 (cost/layouts/module_hooks.py). `expert_overlap`: exchanges of experts go on
    under another microbatch's layers. `linear_loss`: the head's product and the loss go by pieces of the tokens, so that
    logits are never whole. `update_passes`: what an update moves, over one fused kernel's. `updates_lists`: it goes by
    kernels over lists of tensors, and holds one more of each parameter's size meanwhile. `launches_each_expert`: products
    of a rank's experts are launched one by one, and so are the casts of what comes into them. `pads_experts`: each expert
    gets as many tokens, of which some may be padding, so that the host need not read how many. `dispatch_bytes`: of an
    element of a token on its way to its experts; it comes back in two. `saves_narrow`: products of fewer than 16 bits
    keep their inputs as they were cast for them. `narrow_copy_bytes`: of an element of a layer's matrix, in casts kept
    beside it. `narrow_activations`: the gate keeps its inputs in one byte and not its result, attention's is kept once,
    in 12 bits (arXiv:2412.19437, section 3.3.3). `weighs_inside`: a token is weighed between its expert's two products,
    whose result is not kept. `repeats_latent`: pointwise recomputation has latent attention's queries, keys and values
    too. `loss_in_place`: the cross entropy's softmax takes the place of the fp32 copy of the logits. `logit_bytes`: of a
    logit at the loss's peak, where it is another. `casts_shards`: shards of ZeRO stage 3 are the fp32 copies, cast for
    each gather. `lora`: adapters alone are trained, and states are of them; None where all are.
    """

    name: str = "default"
    compute_dtype: str = "bfloat16"
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    optimizer_bytes: int = 12
    fused_attention: bool = True
    fused_mlp: bool = True
    fused_rotary: bool = True
    repeats_keys: bool = False
    fused_accumulation: bool = False
    tensor_overlap: float = 0.0
    overlap_reduce: bool = True
    overlap_gather: bool = True
    overlap_messages: bool = True
    dropout: bool = False
    stage_rule: str = "balanced"
    bucket_bytes: float = 100e6
    shards_tensors: bool = False
    call_s: float = 0.0
    pipelined_call_s: float = 0.0
    far_call_s: float = 0.0
    stalled_message_s: float = 0.0
    stalling_node_chance: float = 0.0
    ahead_bytes: float = 0.0
    reference_code: bool = False
    reuse_parameters: float = 0.0
    reduce_bucket_elements: float = 0.0
    offload_gradients: bool = False
    selective: str = "scores"
    autocast: bool = False
    bucket_copy_bytes: int = 0
    attention_speed: float = 1.0
    attention_backward_share: float | None = None
    fused_loss: bool = False
    logit_bytes: float | None = None
    casts_shards: bool = False
    linear_loss: bool = False
    update_passes: float = 1.0
    updates_lists: bool = False
    loss_in_place: bool = False
    loss_bytes: int = 4
    defers_reduction: bool = False
    whole_in_pipelines: bool = False
    gathers_narrow: bool = False
    loss_parallel: bool = True
    update_gradient_bytes: int = 0
    launch_share: float = 1.0
    module_hook_s: float = 0.0
    expert_overlap: bool = False
    launches_each_expert: bool = False
    pads_experts: bool = False
    dispatch_bytes: float = 2.0
    saves_narrow: bool = False
    narrow_copy_bytes: float = 0.0
    narrow_activations: bool = False
    weighs_inside: bool = False
    repeats_latent: bool = False
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.selective not in SELECTIVE:
            raise UsageError(
                f"selective recomputation is {self.selective!r}.",
                hint=f"it is one of {', '.join(SELECTIVE)}.",
            )

    @property
    def is_narrow(self) -> bool:
        """Products have operands of fewer than 16 bits."""
        return self.compute_dtype.startswith(NARROW)

    @property
    def keeps_narrow(self) -> bool:
        """Inputs of products are kept in fewer than 16 bits; adapters read them as they were."""
        return self.saves_narrow and self.is_narrow and self.lora is None

    @property
    def saved_input_bytes(self) -> float:
        """Of an element of such an input; in four bits with a scale of a byte for each 16 of them (NVFP4)."""
        narrow = 0.5625 if self.compute_dtype.startswith("float4") else 1.0
        return narrow if self.keeps_narrow else 2.0

    @property
    def element_bytes(self) -> float:
        """Of an element of activations: four where products take fp32 or TF32, and nothing casts; beside adapters always two."""
        is_wide = self.compute_dtype in ("float32", "tf32") and not self.autocast and self.lora is None
        return 4.0 if is_wide else 2.0

    @property
    def has_selective(self) -> bool:
        """Selective recomputation changes something: fused attention keeps no scores that could be computed again."""
        return self.selective == "operators" or not self.fused_attention


_COUNTS = (
    "data", "tensor", "pipeline", "context", "expert", "chunks", "micro_batch_size", "num_microbatches",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`data` replicas in all, of which `shard` share what the ZeRO stage shards (None: all of them).

    `chunks`: parts of the model on each pipeline device. `recompute`: none, selective (as `Software.selective` says),
    pointwise (outputs of norms and of the MLP's activation, Yuan et al., ATC 2024) or full (each layer keeps its
    input; `recompute_share` of them, on each device). `offload_optimizer`, `offload_parameters`: they live on the
    host. `offload_activations`: share of saved activations on the host. `stage_layers`: layers of each stage (of each
    chunk, in the model's order), None to have them balanced. `expert_imbalance`: tokens of the expert-parallel rank
    that has most over the mean, measured, or the capacity factor to which a router drops or pads. `tensor_kind`:
    matrices are split along one dimension (Megatron's), or tensor-parallel ranks form a grid
    (cost/layouts/tensor_grids.py); `tensor_depth`: how many grids, of 2.5d.

    ZeRO++ (Wang et al. 2023, arXiv:2306.10209), of ZeRO stage 3: `secondary_shard` (hpZ): so many neighbouring ranks of
    those that share shards, usually a node's, keep a second copy of the parameters that a forward gathered, None for no
    copy. `quantized_weights` (qwZ), `quantized_gradients` (qgZ): what travels has 8 and 4 bits; both lose digits.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    zero_stage: int = 0
    shard: int | None = None
    chunks: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    context_kind: str = "ring"
    micro_batch_size: int = 1
    num_microbatches: int = 1
    recompute: str = "none"
    recompute_share: float = 1.0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_activations: float = 0.0
    stage_layers: tuple[int, ...] | None = None
    expert_imbalance: float = 1.0
    tensor_kind: str = "1d"
    tensor_depth: int = 1
    secondary_shard: int | None = None
    quantized_weights: bool = False
    quantized_gradients: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}.", hint="it is at least 1.")
        if self.zero_stage not in (0, 1, 2, 3):
            raise UsageError(f"the ZeRO stage is {self.zero_stage}.", hint="it is 0, 1, 2 or 3.")
        self._check_grid()
        if self.recompute not in RECOMPUTE:
            raise UsageError(
                f"recompute is {self.recompute!r}.", hint=f"it is one of {', '.join(RECOMPUTE)}."
            )
        if not 0 < self.recompute_share <= 1:
            raise UsageError(f"{self.recompute_share:g} of the layers run again.", hint="above 0, up to 1.")
        if self.shard is not None and (self.shard < 1 or self.data % self.shard):
            raise UsageError(
                f"{self.data} replicas do not part into groups of {self.shard}.", hint="shard divides data."
            )
        if not 1 <= self.expert_imbalance <= max(1, self.expert):
            raise UsageError(
                f"the experts' imbalance is {self.expert_imbalance:g} on {self.expert} expert-parallel ranks.",
                hint="it is tokens of the fullest rank over the mean: from 1 to the number of these ranks.",
            )
        if not 0 <= self.offload_activations <= 1:
            raise UsageError(
                f"the share of activations on the host is {self.offload_activations}.", hint="it is 0 to 1."
            )
        self._check_zeropp()

    def _check_zeropp(self) -> None:
        if self.zero_stage != 3 and self.zeropp:
            raise UsageError(
                f"ZeRO++ ({', '.join(self.zeropp)}) with ZeRO stage {self.zero_stage}.",
                hint="its options go with ZeRO stage 3.",
            )
        ranks = self.secondary_shard
        if ranks is None:
            return
        if ranks < 1 or self.shard_ranks % ranks:
            raise UsageError(
                f"{self.shard_ranks} ranks that share shards do not part into groups of {ranks} for hpZ's second copy.",
                hint="it divides them, and is usually a node's part of them.",
            )
        if self.offload_parameters:
            raise UsageError(
                "hpZ keeps a second copy of parameters on the device, and they are on the host.",
                hint="leave hpz out, or the parameters on the device.",
            )

    def _check_grid(self) -> None:
        if self.tensor_kind not in TENSOR_KINDS:
            raise UsageError(
                f"tensor parallelism is {self.tensor_kind!r}.",
                hint=f"it is one of {', '.join(TENSOR_KINDS)}.",
            )
        if self.tensor_kind == "1d":
            if self.tensor_depth != 1:
                raise UsageError(f"a depth of {self.tensor_depth} goes with 2.5d tensor parallelism.")
            return
        power = 3 if self.tensor_kind == "3d" else 2
        if self.tensor_depth < 1 or (self.tensor_depth > 1 and self.tensor_kind != "2.5d"):
            raise UsageError(
                f"a depth of {self.tensor_depth} is none of {self.tensor_kind} tensor parallelism."
            )
        if self.grid_side**power * self.tensor_depth != self.tensor:
            shape = {"2d": "a square", "2.5d": f"{self.tensor_depth} squares", "3d": "a cube"}[
                self.tensor_kind
            ]
            raise UsageError(
                f"{self.tensor} tensor-parallel ranks are not {shape}.",
                hint="2d takes 4, 9, 16, ...; 2.5d a depth times these; 3d takes 8, 27, 64, ...",
            )
        if self.sequence_parallel or self.context > 1 or self.expert > 1:
            raise UsageError(
                f"{self.tensor_kind} tensor parallelism parts tokens by itself.",
                hint="use it without sequence, context and expert parallelism.",
            )

    @property
    def grid_side(self) -> int:
        """Ranks along a line of a grid of tensor-parallel ranks, at least."""
        power = 3 if self.tensor_kind == "3d" else 2
        side: int = round((self.tensor / self.tensor_depth) ** (1 / power))
        return side

    @property
    def weight_ranks(self) -> int:
        """Among how many tensor-parallel ranks parameters are parted; the grids of 2.5d have the same ones."""
        return self.tensor // self.tensor_depth

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def stream_ranks(self) -> int:
        """Among how many tensor-parallel ranks the residual stream is parted."""
        return self.tensor if self.sequence_parallel or self.tensor_kind != "1d" else 1

    @property
    def shard_ranks(self) -> int:
        """Among how many replicas states are sharded: data (and context) ranks hold the same parameters."""
        return (self.data if self.shard is None else self.shard) * self.context

    @property
    def expert_shard_ranks(self) -> int:
        """Among how many of those that hold the same experts an expert's states are sharded."""
        return max(1, self.shard_ranks // self.expert)

    @property
    def expert_secondary_ranks(self) -> int:
        """Among how many of those an expert's second copy is sharded, of hpZ."""
        return gcd(self.expert_shard_ranks, max(1, (self.secondary_shard or 1) // self.expert))

    @property
    def zeropp(self) -> tuple[str, ...]:
        """The options of ZeRO++ that are in use."""
        used = (self.secondary_shard is not None, self.quantized_weights, self.quantized_gradients)
        return tuple(name for name, on in zip(ZEROPP, used, strict=True) if on)

    @property
    def is_lossy(self) -> bool:
        """Whether collectives round what they carry further than the computation does."""
        return self.quantized_weights or self.quantized_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """One optimizer step: a layout, the length of its sequences, and the code that runs it. Of an encoder-decoder `seq_len`
    is the source's length and `target_len` the decoder's; None for other models.
    """

    layout: Layout
    seq_len: int
    software: Software = field(default_factory=Software)
    target_len: int | None = None

    @property
    def global_batch_sequences(self) -> int:
        layout = self.layout
        return layout.data * layout.micro_batch_size * layout.num_microbatches

    @property
    def repeats_operators(self) -> bool:
        """Recomputation is operator by operator (cost/layouts/operators.py)."""
        return self.layout.recompute == "selective" and self.software.selective == "operators"

    @property
    def keeps_gathered(self) -> bool:
        """ZeRO stage 3 gathers parameters once a step."""
        layout = self.layout
        return self.software.whole_in_pipelines and layout.pipeline > 1 and layout.zero_stage == 3

    @property
    def defers_reduction(self) -> bool:
        """ZeRO stages 2 and 3 sum whole gradients, and reduce them once a step."""
        several = self.layout.num_microbatches > 1 and self.layout.zero_stage >= 2
        is_pipelined = self.layout.pipeline > 1 and self.software.whole_in_pipelines
        return several and (self.software.defers_reduction or is_pipelined)

    @property
    def microbatch_tokens(self) -> float:
        """Of one microbatch on one rank; of an encoder-decoder the source's."""
        return self.layout.micro_batch_size * self.seq_len / self.layout.context

    @property
    def decoded_tokens(self) -> float:
        """Of one microbatch on one rank, those that the head sees."""
        length = self.seq_len if self.target_len is None else self.target_len
        return self.layout.micro_batch_size * length / self.layout.context

    def length_of(self, *, is_decoder: bool) -> int:
        """Tokens of a sequence in a stack; `is_decoder` is that of two."""
        return self.target_len if is_decoder and self.target_len is not None else self.seq_len

    @property
    def tokens(self) -> int:
        """Of a source and of its target alike."""
        return self.global_batch_sequences * (self.seq_len + (self.target_len or 0))
