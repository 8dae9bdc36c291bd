"""The transformer that a run trained, read off what its forward multiplied: layers, heads, widths, experts.

Nothing is taken from a configuration, and nothing is guessed: every product of the forward must be attention or
use a parameter (product_weights.py). What does not fit that picture is given as a reason instead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memadvisor.analyzers.intervals import holds, union
from memadvisor.analyzers.product_weights import NoTransformer, Product, ProductWeights, Shape
from memadvisor.run.records import Operator, Step
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Sizes of a decoder or encoder of equal attention layers. A tied parameter counts once.

    `num_product_weights` are elements of the matrices that multiply every token, `num_expert_weights` those of all
    routed experts (of which `num_active_experts` in `num_experts` run for a token), `num_router_weights` the part
    of the former that chooses them, `num_head_weights` the part that makes logits of the vocabulary.
    `num_embedding_weights` are tables that are looked up in and not multiplied by.
    """

    num_layers: int
    num_heads: int
    num_key_value_heads: int | None  # None where attention is written out: keys are repeated before it
    key_width: int
    value_width: int
    sequence: int
    num_tokens: int  # of the step, on this rank
    vocabulary: int | None  # None without a head over the vocabulary
    num_experts: int | None
    num_active_experts: int | None
    num_parameters: int
    num_frozen_parameters: int
    num_embedding_weights: int
    num_product_weights: int
    num_expert_weights: int
    num_router_weights: int
    num_head_weights: int


def training_operators(rank: RankRun) -> list[Operator]:
    """The traced step's operators without those of evaluation passes."""
    step = rank.traced_step
    if step is None:
        return []
    evaluations = union(
        (s.start_s, s.end_s) for s in rank.spans if s.step == step.index and s.kind == "evaluation"
    )
    return [row for row in rank.operators if not holds(evaluations, row.start_s)]


def transformer_shape(rank: RankRun) -> TransformerShape:
    """Raises NoTransformer with the reason where the model is none, or cannot be read."""
    step = rank.traced_step
    rows = [row for row in training_operators(rank) if row.phase == "forward" and row.model_flops]
    if step is None or not rows:
        raise NoTransformer("no forward was traced")
    if all(row.shapes is None for row in rows):
        raise NoTransformer("operators' shapes are not recorded")
    if not step.num_tokens or not step.num_samples:
        raise NoTransformer("the model's input is no batch of token sequences")
    products, batched, fused = _sort_out(rows)
    weights = ProductWeights(rank)
    written_out = [product for product in batched if not weights.take(product)]
    for product in products:
        if not weights.take(product):
            raise NoTransformer(f"a product by {list(product.right)} in {product.module!r} uses no parameter")
    if not fused and not written_out:
        raise NoTransformer("no attention was seen")
    attention = _fused_attention(fused, step) if fused else _written_out_attention(written_out, step)
    if fused and written_out:
        raise NoTransformer("attention layers differ from one another")
    return TransformerShape(num_tokens=step.num_tokens, **attention, **asdict(weights.sizes(step.num_tokens)))


_PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "_addmm_activation",
        "linear",
        "_scaled_mm",
        "_int_mm",
        "_linear_pointwise",
        "_mkl_linear",
    ]
)
_BATCHED = frozenset(["bmm", "baddbmm", "_grouped_mm", "_scaled_grouped_mm"])


def _sort_out(
    rows: Iterable[Operator],
) -> tuple[list[Product], list[Product], list[tuple[Shape, ...]]]:
    """Products by two matrices, batched ones, and fused attention's (query, key, value)."""
    products, batched, fused = [], [], []
    for row in rows:
        name = row.name.rpartition("::")[2]
        shapes = _parse(row.shapes)
        dimensions = [len(shape) for shape in shapes]
        if "attention" in name and dimensions == [4, 4, 4]:
            fused.append(tuple(shapes))
        elif name in _PRODUCTS and len(dimensions) == 2 and min(dimensions) >= 2:
            products.append(Product(row.module, shapes[0], shapes[1]))
        elif name in _BATCHED and dimensions in ([3, 3], [2, 3]):
            batched.append(Product(row.module, shapes[0], shapes[1]))
        else:
            raise NoTransformer(f"it runs {name}, which the formula does not know")
    grouped = [product for product in batched if len(product.left) == 2]  # rows by the weights of their group
    return products + grouped, [product for product in batched if len(product.left) == 3], fused


def _parse(text: str | None) -> list[Shape]:
    """What the record says, which may have been damaged; the sizes of a jagged tensor may be null."""
    try:
        shapes = [tuple(shape) for shape in json.loads(text or "[]")]
    except (ValueError, TypeError, RecursionError):
        raise NoTransformer("operators' shapes cannot be read") from None
    if any(type(size) is not int or size < 1 for shape in shapes for size in shape):
        raise NoTransformer("the sizes of a product are not numbers")
    return shapes


def _fused_attention(calls: Sequence[tuple[Shape, ...]], step: Step) -> dict[str, Any]:
    """Layers, heads and widths, equal in all layers; a packed batch is one long sequence of shape."""
    num_tokens, sequence = _tokens_and_sequence(step)
    kinds: Counter[tuple[int, int, int, int]] = Counter()
    for query, key, value in calls:
        if query[2] != key[2]:
            raise NoTransformer("queries and keys have different lengths")
        if query[2] != sequence and query[0] != 1:
            raise NoTransformer("attention spans another length than the samples have")
        kinds[query[1], key[1], query[3], value[3]] += query[0] * query[2]
    if len(kinds) != 1:
        raise NoTransformer("attention layers differ from one another")
    (heads, key_heads, width, value_width), num_positions = kinds.most_common(1)[0]
    num_layers, rest = divmod(num_positions, num_tokens)
    if rest or not num_layers:
        raise NoTransformer("attention does not see every token once a layer")
    return _attention(num_layers, heads, key_heads, width, value_width, sequence)


def _written_out_attention(products: Sequence[Product], step: Step) -> dict[str, Any]:
    """Pairs of batched products, scores and values: (batch times heads, length, width) by its transpose, and the
    (length, length) scores by the values."""
    num_tokens, sequence = _tokens_and_sequence(step)
    widths: set[tuple[int, int]] = set()
    num_heads_by_position = 0
    for scores, values in zip(products[::2], products[1::2], strict=False):
        batch_heads, length, width = scores.left
        if scores.right[2] != length or values.left != (batch_heads, length, length) or length != sequence:
            raise NoTransformer("a batched product is no attention of a sequence with itself")
        widths.add((width, values.right[2]))
        num_heads_by_position += batch_heads * length
    num_layers, rest = divmod(len(products), 2 * max(1, step.num_micro_batches))
    if rest or len(widths) != 1 or num_heads_by_position % (num_tokens * num_layers):
        raise NoTransformer("attention layers differ from one another")
    width, value_width = widths.pop()
    num_heads = num_heads_by_position // (num_tokens * num_layers)
    return _attention(num_layers, num_heads, None, width, value_width, sequence)


def _tokens_and_sequence(step: Step) -> tuple[int, int]:
    num_tokens, num_samples = step.num_tokens or 0, step.num_samples or 1
    sequence, rest = divmod(num_tokens, num_samples)
    if rest:
        raise NoTransformer("the samples have different lengths")
    return num_tokens, sequence


def _attention(
    layers: int, heads: int, key_heads: int | None, width: int, value_width: int, sequence: int
) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "num_heads": heads,
        "num_key_value_heads": key_heads,
        "key_width": width,
        "value_width": value_width,
        "sequence": sequence,
    }
