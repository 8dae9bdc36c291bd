"""What low-rank adapters add to a layer, and what freezing its matrices takes away (Hu et al. 2021, arXiv:2106.09685,
section 4).

A product with a frozen matrix has no gradient of the matrix: its backward is one product in place of two, and its input
need not be kept. An adapter of rank r beside a matrix (m x n) has r (m + n) parameters and two products; it keeps its
input and the r columns between them. Where matrices are quantised, each product, forward and backward, has them made 16
bits wide first (Dettmers et al. 2023, arXiv:2305.14314, equation 5).
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.recurrences import recurrence_output_bytes
from memadvisor.cost.layouts.saved_autocast import num_readers
from memadvisor.layout import TrainingStep
from memadvisor.lora import LINEAR, Lora
from memadvisor.recurrence import Recurrence

# An adapter's forward: its dropout, two products, their scale and the sum (peft/tuners/lora/layer.py).
_OPERATORS = 5
# Of a quantised matrix: its scales and itself made wide.
_WIDENING_OPERATORS = 2
# Of an input's element where adapters are in fp32: cast to it, and under autocast back; of its dropout there.
_CAST_BYTES, _DROPOUT_BYTES = 12.0, 9.0
_NARROW_DROPOUT_BYTES = 5.0
# Of a result's element, and of the gradient of an input's: both are read, their sum is written.
_SUM_BYTES = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One matrix (depth x columns) of a layer, by its name in `lora.MATRICES`. `is_partial`: tensor parallelism parts its
    depth, else its columns. `num_experts`: so many of it, of which each token passes some; 0 where all tokens pass it.
    `reads`: whose result its input is: of the norm before attention or before the feed-forward block, of attention, of
    the activation, of the encoder.
    """

    target: str
    depth: int
    columns: int
    reads: str
    is_partial: bool = False
    num_experts: int = 0

    def adapter_parameters(self, rank: int, tensor: int) -> float:
        """Of one adapter on one rank: the side that tensor parallelism parts is parted, the other one is whole."""
        parted, whole = (self.depth, self.columns) if self.is_partial else (self.columns, self.depth)
        return rank * (parted / tensor + whole)


def layer_matrices(model: Architecture, layer: int) -> list[Matrix]:
    """Those of a layer that may have adapters; routers have none."""
    found = _attention(model, "norm1", "norm1") if model.has_attention(layer) else []
    if model.recurrence is not None and model.has_recurrence(layer):
        found += _recurrence(model.hidden, model.recurrence)
    if model.has_cross_attention(layer):
        found += _attention(model, "cross", "encoder")
    if model.experts is not None and model.has_experts(layer):
        experts = model.experts
        found += _feed_forward(model, experts.expert_ffn, experts.num_experts)
        return found + (_feed_forward(model, experts.shared_ffn) if experts.shared_ffn else [])
    return found + (_feed_forward(model, model.ffn) if model.has_feed_forward(layer) else [])


# Of a recurrence's matrices: they have adapters where all matrices do.
_MIXERS = "mixer"


def _recurrence(hidden: int, mixer: Recurrence) -> list[Matrix]:
    steps = []
    if mixer.kind == "mamba":
        steps = [
            Matrix(
                target=_MIXERS,
                depth=mixer.inner,
                columns=mixer.step_columns,
                reads="convolution",
                is_partial=True,
            ),
            Matrix(target=_MIXERS, depth=mixer.step_rank, columns=mixer.inner, reads="steps"),
        ]
    if mixer.kind == "kimi_delta":
        steps = [
            Matrix(target=_MIXERS, depth=mixer.step_rank, columns=mixer.inner, reads=reads)
            for reads in ("decay", "gate")
        ]
    return [
        Matrix(target=_MIXERS, depth=hidden, columns=mixer.in_columns, reads="norm1"),
        *steps,
        Matrix(target=_MIXERS, depth=mixer.inner, columns=hidden, reads="recurrence", is_partial=True),
    ]


def _attention(model: Architecture, queries: str, keys: str) -> list[Matrix]:
    hidden, latent = model.hidden, model.latent
    if latent is not None:
        query = model.n_heads * (latent.nope_head_dim + latent.rope_head_dim)
        value = model.n_heads * latent.value_head_dim
        low = [Matrix(target="query", depth=hidden, columns=latent.q_rank or query, reads=queries)]
        if latent.q_rank:
            low.append(Matrix(target="query", depth=latent.q_rank, columns=query, reads="latent"))
        expanded = model.n_heads * latent.nope_head_dim + value
        return [
            *low,
            Matrix(target="key", depth=hidden, columns=latent.kv_rank + latent.rope_head_dim, reads=keys),
            Matrix(target="value", depth=latent.kv_rank, columns=expanded, reads="latent"),
            Matrix(target="output", depth=value, columns=hidden, reads="attention", is_partial=True),
        ]
    query, key = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    gated = query * (2 if model.attention_gate else 1)
    return [
        Matrix(target="query", depth=hidden, columns=gated, reads=queries),
        Matrix(target="key", depth=hidden, columns=key, reads=keys),
        Matrix(target="value", depth=hidden, columns=key, reads=keys),
        Matrix(target="output", depth=query, columns=hidden, reads="attention", is_partial=True),
    ]


def _feed_forward(model: Architecture, ffn: int, num_experts: int = 0) -> list[Matrix]:
    up = [
        Matrix(target=name, depth=model.hidden, columns=ffn, reads="norm2", num_experts=num_experts)
        for name in (("gate", "up") if model.gated_mlp else ("up",))
    ]
    down = Matrix(
        target="down",
        depth=ffn,
        columns=model.hidden,
        reads="inner",
        is_partial=True,
        num_experts=num_experts,
    )
    return [*up, down]


def adapted_matrices(model: Architecture, lora: Lora, layer: int) -> list[Matrix]:
    """Those beside which there is an adapter; `qkv` is one of the three's columns."""
    targets = lora.targets + ((_MIXERS,) if set(LINEAR) <= set(lora.targets) else ())
    found = [matrix for matrix in layer_matrices(model, layer) if matrix.target in targets]
    if "qkv" in lora.targets:
        parts = [one for one in layer_matrices(model, layer) if one.target in ("query", "key", "value")]
        for reads in dict.fromkeys(one.reads for one in parts):
            together = [one for one in parts if one.reads == reads]
            columns = sum(one.columns for one in together)
            found.append(Matrix(target="qkv", depth=together[0].depth, columns=columns, reads=reads))
    return found


def adapter_parameters(model: Architecture, lora: Lora, layer: int, tensor: int) -> tuple[float, float]:
    """Of one layer on one tensor-parallel rank: those that all tokens pass, and all experts' together."""
    sizes = [
        (one.num_experts, one.adapter_parameters(lora.rank, tensor))
        for one in adapted_matrices(model, lora, layer)
    ]
    return sum(size for count, size in sizes if not count), sum(count * size for count, size in sizes)


def active_adapter_parameters(model: Architecture, lora: Lora) -> float:
    """Of the whole model, those that one token meets."""
    chosen = 0 if model.experts is None else model.experts.experts_per_token
    return sum(
        count * (chosen if one.num_experts else 1) * one.adapter_parameters(lora.rank, 1)
        for count, layer in model.kinds().values()
        for one in adapted_matrices(model, lora, layer)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWork:
    """Of one layer's forward. `products`: (rows, columns, depth, count). `stream_bytes`: what everything between them
    moves, and `backward_bytes` in the backward, where the results' sum moves nothing and two gradients of the input are
    added. `widening_bytes`: what making quantised matrices 16 bits wide moves. `num_operators`: launched beside the
    frozen ones."""

    products: tuple[tuple[float, float, float, float], ...] = ()
    stream_bytes: float = 0.0
    backward_bytes: float = 0.0
    widening_bytes: float = 0.0
    num_operators: int = 0


def adapter_work(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> AdapterWork:
    """`tokens` of a microbatch on one rank. Nothing where all parameters are trained."""
    lora = step.software.lora
    if lora is None:
        return AdapterWork()
    tensor = step.layout.tensor
    products: list[tuple[float, float, float, float]] = []
    stream = backward = 0.0
    matrices = adapted_matrices(model, lora, layer)
    for one in matrices:
        rows, count = _rows(model, step, one, tokens)
        depth, columns = _local(one, tensor)
        products += [(rows / count, lora.rank, depth, count), (rows / count, columns, lora.rank, count)]
        stream += rows * (depth * _input_bytes(step, lora) + columns * _SUM_BYTES)
        backward += rows * depth * (_input_bytes(step, lora) + _SUM_BYTES)
    return AdapterWork(
        products=tuple(products),
        stream_bytes=stream,
        backward_bytes=backward,
        widening_bytes=_widening_bytes(model, step, layer),
        num_operators=_OPERATORS * len(matrices)
        + (_WIDENING_OPERATORS * len(layer_matrices(model, layer)) if lora.is_quantized else 0),
    )


def _input_bytes(step: TrainingStep, lora: Lora) -> float:
    """What comes before an adapter's first product, of an element of its input."""
    if step.software.parameter_bytes == 4:
        return _CAST_BYTES + (_DROPOUT_BYTES if lora.dropout else 0.0)
    return _NARROW_DROPOUT_BYTES if lora.dropout else 0.0


def _local(matrix: Matrix, tensor: int) -> tuple[float, float]:
    if matrix.is_partial:
        return matrix.depth / tensor, float(matrix.columns)
    return float(matrix.depth), matrix.columns / tensor


def _rows(model: Architecture, step: TrainingStep, matrix: Matrix, tokens: float) -> tuple[float, float]:
    """Tokens that pass a matrix on one rank, all its experts there together, and how many these are."""
    if matrix.reads == "encoder":
        return step.microbatch_tokens, 1.0
    if not matrix.num_experts or model.experts is None:
        return tokens, 1.0
    passed = tokens * model.experts.experts_per_token * step.layout.expert_imbalance
    return passed, max(1.0, matrix.num_experts / step.layout.expert)


def _widening_bytes(model: Architecture, step: TrainingStep, layer: int) -> float:
    lora, layout = step.software.lora, step.layout
    if lora is None or not lora.is_quantized:
        return 0.0
    elements = sum(
        one.depth * one.columns / layout.tensor * max(1.0, one.num_experts / layout.expert)
        for one in layer_matrices(model, layer)
    )
    return elements * lora.widening_bytes


def input_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """What adapters of a layer keep of one microbatch on one rank: their inputs, and the columns between their products.

    Where adapters are in fp32, or behind a dropout, each has an input of its own; else all that read one result share it, and
    what fused attention keeps anyhow is there.
    """
    software, tensor = step.software, step.layout.tensor
    lora = software.lora
    if lora is None:
        return 0.0
    is_own = (lora.dropout or software.parameter_bytes == 4) and not lora.shares_inputs
    # Kept anyhow: by fused attention its result, and by frozen products that keep their inputs all of these.
    seen = {"attention"} if software.fused_attention else set()
    if lora.keeps_inputs:
        seen = {one.reads for one in layer_matrices(model, layer)}
    if lora.shares_inputs:
        seen |= {"inner"}
    kept = 0.0
    for one in adapted_matrices(model, lora, layer):
        rows = _rows(model, step, one, tokens)[0]
        parts = tensor if one.is_partial else step.layout.stream_ranks
        if is_own or one.reads not in seen:
            kept += rows * one.depth / parts * (3.0 if lora.dropout else 2.0)
        kept += 2.0 * rows * lora.rank
        seen.add(one.reads)
    return kept


def kept_inputs_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """Inputs of frozen products that keep them, each result once, on one rank; of other products nothing."""
    lora, layout = step.software.lora, step.layout
    if lora is None or not lora.keeps_inputs:
        return 0.0
    kept = 0.0
    for one in {one.reads: one for one in layer_matrices(model, layer)}.values():
        parts = layout.tensor if one.is_partial else layout.stream_ranks
        kept += 2.0 * _rows(model, step, one, tokens)[0] * one.depth / parts
    return kept


def frozen_inputs_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """Of what a layer keeps when all is trained (saved.py), what is for the gradients of its matrices and norms alone."""
    software, layout = step.software, step.layout
    if software.lora is None or step.repeats_operators:
        return 0.0
    # Results of norms and of the activation, which pointwise recomputation does not keep; of Hugging Face's code it is
    # not modelled.
    are_gone = layout.recompute == "pointwise" and not software.reference_code
    norms = model.num_norms(layer)
    if software.lora.keeps_inputs:
        is_scaled = software.reference_code and model.reference_code.norm_bytes >= 8
        return tokens * model.hidden * (2.0 * norms if is_scaled else 0.0) / layout.stream_ranks
    per_hidden = (
        0.0 if are_gone else 2.0 * min(norms, model.num_sublayers(layer))
    )  # of each norm before products, its result
    if software.reference_code:
        code = model.reference_code
        if software.autocast:  # a copy for each product that reads it
            per_hidden = 2.0 * num_readers(model, layer)
        elif code.norm_bytes >= 8:  # and what its weights multiply
            per_hidden = 4.0 * norms
    found = tokens * model.hidden * per_hidden / layout.stream_ranks
    found += recurrence_output_bytes(model, step, layer, tokens)
    if not software.fused_attention and model.has_attention(layer):
        value = model.head_dim if model.latent is None else model.latent.value_head_dim
        found += 2.0 * tokens * model.n_heads * value / layout.tensor
    if model.experts is None or not model.has_experts(layer):
        feeds_forward = model.has_feed_forward(layer) and not are_gone
        return found + (2.0 * tokens * model.ffn / layout.tensor if feeds_forward else 0.0)
    experts = model.experts
    passed = tokens * experts.experts_per_token * layout.expert_imbalance
    inner = passed * experts.expert_ffn + tokens * experts.shared_ffn
    return found + 2.0 * (passed * model.hidden + (0.0 if are_gone else inner)) / layout.tensor
