"""How a training step is spread over accelerators, and what it does: pure data, checked on construction.

Ranks are numbered as Megatron and nanotron do: tensor innermost, then context, data, pipeline outermost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from memadvisor.errors import UsageError
from memadvisor.software_traits import Software

STAGE_RULES = ("balanced", "even", "running")
TENSOR_KINDS = ("1d", "2d", "2.5d", "3d")
RECOMPUTE = ("none", "selective", "pointwise", "full")
ZEROPP = ("hpz", "qwz", "qgz")


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
    def expert_tensor_ranks(self) -> int:
        """Ranks that have a part of the same expert each."""
        return 1 if self.software.whole_experts else self.layout.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks that tokens go to their experts among."""
        return self.layout.expert * (self.layout.tensor if self.software.whole_experts else 1)

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
