"""What a transformer is made of, as its configuration says: the shapes that memory and time follow from.

Counts of parameters are exact for the blocks described here (Vaswani et al. 2017; SwiGLU: Shazeer 2020; grouped heads:
Ainslie et al. 2023; latent attention: DeepSeek-V2, arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memadvisor.errors import UsageError
from memadvisor.recurrence import Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward blocks of which each token passes `experts_per_token`, and `shared_ffn` columns that all pass.

    `first_dense` layers at the beginning have the plain feed-forward block; behind them each `every`th layer has experts,
    beginning with the first. `shared_gate`: a vector weighs the shared columns. `router_bias`: the router has one number
    more of each expert, a bias, or what balances them. `groups_per_token` of `groups` of experts, side by side, may have
    a token (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).
    """

    num_experts: int
    experts_per_token: int
    expert_ffn: int
    shared_ffn: int = 0
    first_dense: int = 0
    every: int = 1
    shared_gate: bool = False
    router_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Keys and values go through `kv_rank` columns, queries through `q_rank` (None: straight).

    `index_heads` heads of `index_head_dim` columns, out of the queries' ranks, score one key of each token, and attention
    sees the best keys alone (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1; how many is the architecture's `window`).
    """

    kv_rank: int
    q_rank: int | None
    rope_head_dim: int
    nope_head_dim: int
    value_head_dim: int
    index_heads: int = 0
    index_head_dim: int = 0

    def index_parameters(self, hidden: int) -> int:
        """Of what scores keys: queries, the key with its norm, and a weight of each head."""
        columns = self.index_heads * self.index_head_dim
        if not columns:
            return 0
        key = hidden * self.index_head_dim + 2 * self.index_head_dim
        return (self.q_rank or hidden) * columns + key + hidden * self.index_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCode:
    """How the model's class in Hugging Face's transformers is written, as far as autograd keeps tensors for it (5.x, checked
    against captures of it in tests/cost/layouts/test_saved_reference.py).

    `norm_bytes`: kept of an element of the residual stream by a norm, its result among it: 4 of LayerNorm, 8 of the
    RMSNorm that copies its input to fp32, 10 of T5's. `activation_tensors`: of the inner width, kept by the activation
    function beside its result: 1 of gelu and silu, 0 of relu, 4 of gelu_new, which is written in separate operators.
    `fp32_softmax`: scores are made fp32 for it. `residual_dropout`, `score_dropout`, `inner_dropout`: behind attention and
    feed-forward, on attention's weights, on the input of the second product. `fused_qkv`: one product makes queries,
    keys and values, which stays while keys and values are copied to a cache. `logit_bytes`: at the peak of the loss, of
    one logit: 12 where it is made fp32 (with its softmax and their gradient; 2 of the logits themselves), 6 where not.
    """

    norm_bytes: float = 4.0
    activation_tensors: int = 1
    fp32_softmax: bool = True
    residual_dropout: bool = False
    score_dropout: bool = False
    inner_dropout: bool = False
    fused_qkv: bool = False
    logit_bytes: float = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower:
    """What makes tokens of images before a language model: `stack`, an encoder over the patches of one image each, and
    `around` it parameters of the patches' projection, positions, norms and what leads into the language model.

    `merged`: so many patches become one token. `image_tokens`: tokens of an image in the sequence, None where that
    depends on the image. `images`: how many a sequence has, as it is asked for; their tokens are among the sequence's.
    `is_trained`: its parameters have gradients and optimizer state.
    """

    stack: Architecture
    around: int
    merged: int = 1
    image_tokens: int | None = None
    images: int = 0
    is_trained: bool = True

    @property
    def patches(self) -> int:
        """Of an image."""
        return (self.image_tokens or 0) * self.merged

    def num_parameters(self) -> int:
        return self.stack.num_parameters() + self.around


class LayerKind(NamedTuple):
    """Layers of one kind have the same parameters and do the same work. `block`: one of recurrence.BLOCKS."""

    block: str = "a"
    has_experts: bool = False
    has_cross_attention: bool = False
    window: int = 0


# What most models are: a Llama's class, and that of a model with LayerNorm.
LLAMA_CODE = ReferenceCode(norm_bytes=8.0)
LAYER_NORM_CODE = ReferenceCode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One transformer. `gated_mlp`: three matrices (SwiGLU) in place of two. `positions`: rows of a learned table of
    positions, 0 for none. `norm_vectors`: parameters of a norm, in units of `hidden` (1 RMSNorm, 2 LayerNorm; 3 with
    a vector that scales a part's result, as of DINOv2).
    `causal` is False for encoders. `biases`: all linear layers of a block have them; `qkv_biases`, `output_bias`,
    `mlp_biases`: those alone (of latent attention the first products do). `qk_norm`: parameters of a layer's norms over queries and keys. `attention_sinks`: each head
    has a number that takes part in its softmax. `embedding_norm`: a norm over the embedded tokens. `head_bias`: the output
    projection has one. `head_layer`: so does a product as wide as the stream before it, and a norm (BERT). `key_bias` is False
    where keys alone lack theirs (Whisper). `code`: how Hugging Face's class of it is written, None where it is as most with such norms are.

    `encoder_layers`: so many of `n_layers`, the first ones, are an encoder's, whose result every layer behind them attends
    to besides (cross attention, with a norm of its own); tables of positions, the norm of the embedding and the last norm
    (`final_norm`) are there once for either stack. `relative_buckets`: rows of a stack's table of relative positions (T5).

    `layer_pattern`: what each layer is made of, a letter for each (recurrence.BLOCKS), from the first layer again when it
    is through; where there is none all are attention with a feed-forward block. `recurrence`: what is there in place of
    attention, or beside it. `attention_gate`: as many columns as the queries have weigh attention's result (Qwen3-Next).

    `window`: how many tokens before its own a token of most layers sees, itself among them, 0 for all; of such a model each
    `full_every`th layer sees all (0: none).

    `around`, `beside`: parameters around the layers (fewer than none where there is less than a table of tokens), counted with the
    embedding, and of each layer, that nothing else here tells: kinds of tokens, convolutions before an encoder, norms inside of
    blocks. `tower`: of images, counted with the embedding. `left_out`: what else config.json has and is not counted, in words.
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool
    gated_mlp: bool
    positions: int = 0
    biases: bool = False
    norm_vectors: int = 1
    causal: bool = True
    qkv_biases: bool = False
    output_bias: bool = False
    mlp_biases: bool = False
    norms_per_layer: int = 2
    qk_norm: int = 0
    attention_sinks: bool = False
    embedding_norm: bool = False
    head_bias: bool = False
    head_layer: bool = False
    key_bias: bool = True
    around: int = 0
    beside: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    code: ReferenceCode | None = None
    encoder_layers: int = 0
    relative_buckets: int = 0
    final_norm: bool = True
    layer_pattern: str = ""
    recurrence: Recurrence | None = None
    attention_gate: bool = False
    window: int = 0
    full_every: int = 0
    tower: VisionTower | None = None
    left_out: str = ""

    @property
    def scales_parts(self) -> bool:
        """Whether a vector of their own scales the results of attention and feed-forward, which are kept for its gradient."""
        return self.norm_vectors > 2

    @property
    def num_stacks(self) -> int:
        """Two of an encoder and a decoder."""
        return 2 if self.encoder_layers else 1

    @property
    def reference_code(self) -> ReferenceCode:
        if self.code is not None:
            return self.code
        return LLAMA_CODE if self.norm_vectors == 1 else LAYER_NORM_CODE

    def attention_parameters(self) -> int:
        """Projections of one layer's attention, with their biases."""
        if self.latent is not None:
            latent = self.latent
            query_columns = self.n_heads * (latent.nope_head_dim + latent.rope_head_dim)
            if latent.q_rank is None:
                queries = self.hidden * query_columns
            else:
                queries = self.hidden * latent.q_rank + latent.q_rank + latent.q_rank * query_columns
            keys = self.hidden * (latent.kv_rank + latent.rope_head_dim) + latent.kv_rank
            expanded = latent.kv_rank * self.n_heads * (latent.nope_head_dim + latent.value_head_dim)
            down = (latent.q_rank or 0) + latent.kv_rank + latent.rope_head_dim
            biases = down * self.qkv_biases + self.hidden * self.output_bias
            biases += latent.index_parameters(self.hidden)
            return queries + keys + expanded + biases + self.n_heads * latent.value_head_dim * self.hidden
        queries_columns = self.n_heads * self.head_dim
        columns = queries_columns * (2 if self.attention_gate else 1) + 2 * self.n_kv_heads * self.head_dim
        biases = columns if self.biases or self.qkv_biases else 0
        biases -= self.n_kv_heads * self.head_dim if biases and not self.key_bias else 0
        biases += self.hidden if self.biases or self.output_bias else 0
        sinks = self.n_heads if self.attention_sinks else 0
        return self.hidden * columns + queries_columns * self.hidden + biases + self.qk_norm + sinks

    def mlp_parameters(self, ffn: int) -> int:
        """One feed-forward block with `ffn` inner columns."""
        inner = 2 if self.gated_mlp else 1
        biases = inner * ffn + self.hidden if self.biases or self.mlp_biases else 0
        return (inner + 1) * self.hidden * ffn + biases

    def norm_parameters(self) -> int:
        """One norm over the residual stream."""
        return self.norm_vectors * self.hidden

    def block_of(self, layer: int) -> str:
        """One of recurrence.BLOCKS."""
        return self.layer_pattern[layer % len(self.layer_pattern)] if self.layer_pattern else "a"

    def has_attention(self, layer: int) -> bool:
        return self.block_of(layer) in "abA"

    def has_recurrence(self, layer: int) -> bool:
        return self.recurrence is not None and self.block_of(layer) in "rbR"

    def has_feed_forward(self, layer: int) -> bool:
        """A dense block, or experts."""
        return self.block_of(layer) in "arbFE"

    def has_experts(self, layer: int) -> bool:
        experts, block = self.experts, self.block_of(layer)
        if experts is None or block in "ARF":
            return False
        is_behind = layer >= experts.first_dense and (layer - experts.first_dense) % experts.every == 0
        return block == "E" or is_behind

    def num_sublayers(self, layer: int) -> int:
        """Sums of the residual stream: of a mixer, of cross attention and of a feed-forward block."""
        return (1 if self.block_of(layer) in "ARFE" else 2) + self.has_cross_attention(layer)

    def num_norms(self, layer: int) -> int:
        """Over the residual stream."""
        if self.block_of(layer) in "ARFE":
            return 1
        return self.norms_per_layer + self.has_cross_attention(layer)

    def has_cross_attention(self, layer: int) -> bool:
        return 0 < self.encoder_layers <= layer

    def window_of(self, layer: int) -> int:
        """Tokens that a token of this layer sees at most; 0 for all."""
        sees_all = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return 0 if sees_all or not self.has_attention(layer) else self.window

    def kind_of(self, layer: int) -> LayerKind:
        return LayerKind(
            self.block_of(layer),
            self.has_experts(layer),
            self.has_cross_attention(layer),
            self.window_of(layer),
        )

    def kinds_among(self, layers: Sequence[int]) -> dict[LayerKind, tuple[int, int]]:
        """Of each kind that is among these layers, how many there are, and the number of one of them; in the order they come."""
        alike = self.experts is None and not self.encoder_layers and not self.layer_pattern
        if alike and not self.window:
            return {LayerKind(): (len(layers), layers[0])} if layers else {}
        kinds = [self.kind_of(layer) for layer in layers]
        one_of = dict(zip(kinds, layers, strict=True))
        return {kind: (count, one_of[kind]) for kind, count in Counter(kinds).items()}

    def kinds(self) -> dict[LayerKind, tuple[int, int]]:
        """Of the whole model."""
        return self.kinds_among(range(self.n_layers))

    def shared_layer_parameters(self, layer: int) -> int:
        """What every rank of an expert-parallel group holds of one layer: all of it but the experts."""
        count = self.num_norms(layer) * self.norm_parameters() + self.beside
        if self.has_attention(layer):
            count += self.attention_parameters() * (2 if self.has_cross_attention(layer) else 1)
        if self.recurrence is not None and self.has_recurrence(layer):
            count += self.recurrence.num_parameters(self.hidden)
        if not self.has_feed_forward(layer):
            return count
        if not self.has_experts(layer) or self.experts is None:
            return count + self.mlp_parameters(self.ffn)
        router = (self.hidden + self.experts.router_bias) * self.experts.num_experts
        shared = self.mlp_parameters(self.experts.shared_ffn) if self.experts.shared_ffn else 0
        gate = self.hidden if self.experts.shared_gate else 0
        return count + router + shared + gate

    def expert_layer_parameters(self, layer: int) -> int:
        """All experts of one layer."""
        if not self.has_experts(layer) or self.experts is None:
            return 0
        return self.experts.num_experts * self.mlp_parameters(self.experts.expert_ffn)

    def layer_parameters(self, layer: int) -> int:
        return self.shared_layer_parameters(layer) + self.expert_layer_parameters(layer)

    def tower_parameters(self) -> int:
        return 0 if self.tower is None else self.tower.num_parameters()

    def frozen_tower_parameters(self) -> int:
        """Of a tower that is not trained."""
        return 0 if self.tower is None or self.tower.is_trained else self.tower.num_parameters()

    def embedding_parameters(self) -> int:
        """The table of tokens, for each stack that of positions and the norm over what they give, the tower of images, and the
        head's own layer."""
        norm = self.norm_parameters() if self.embedding_norm else 0
        positions = self.positions * self.hidden + self.relative_buckets * self.n_heads
        others = self.tower_parameters() + self.around + self.head_layer_parameters()
        return self.vocab * self.hidden + self.num_stacks * (positions + norm) + others

    def head_layer_parameters(self) -> int:
        """The product before the output projection, its bias and its norm."""
        if not self.head_layer:
            return 0
        return self.hidden * (self.hidden + self.biases) + self.norm_parameters()

    def head_parameters(self) -> int:
        """The output projection; as large as the table of tokens, of which it is the same tensor when tied."""
        return self.vocab * self.hidden

    def num_parameters(self) -> int:
        """Each tensor counted once."""
        layers = sum(count * self.layer_parameters(layer) for count, layer in self.kinds().values())
        head = 0 if self.tied_embeddings else self.head_parameters()
        bias = self.vocab if self.head_bias else 0
        last_norms = self.num_stacks * self.norm_parameters() if self.final_norm else 0
        return layers + self.embedding_parameters() + head + bias + last_norms

    def active_parameters(self) -> int:
        """Those that one token meets."""
        if self.experts is None:
            return self.num_parameters()
        idle = self.experts.num_experts - self.experts.experts_per_token
        sparse = sum(count for kind, (count, _) in self.kinds().items() if kind.has_experts)
        return self.num_parameters() - sparse * idle * self.mlp_parameters(self.experts.expert_ffn)


def target_length(model: Architecture, given: int | None, seq_len: int) -> int | None:
    """Tokens that an encoder-decoder's decoder sees: as many as the source's where nothing is given; None for other models.

    Raises UsageError for a length that other models do not have.
    """
    if model.encoder_layers:
        return seq_len if given is None else given
    if given is not None:
        raise UsageError(
            f"{model.name} has no encoder, and a target of {given} tokens is given.",
            hint="leave the target's length out; the sequence's is all there is.",
        )
    return None
