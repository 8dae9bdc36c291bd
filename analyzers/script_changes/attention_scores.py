"""Attention whose weights are kept for the backward, where `scaled_dot_product_attention` would keep none.

The weights of a layer are batch x heads x length x length. FlashAttention (arXiv:2205.14135, section 3) keeps the
output, and the logarithm of each row's sum in float32, and makes the rest again in its backward. It also keeps queries, keys
and values as they are given, where products of batches keep copies of them: how much that moves is not recorded.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from memadvisor.analyzers.altered_curve import FOREVER_S, moved_death
from memadvisor.analyzers.checkpointing import kind_of
from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.analyzers.shapes import dimensions
from memadvisor.run.records import Saved
from memadvisor.units import format_bytes

_FLOAT32_BYTES = 4


def attention_scores(facts: Facts) -> ScriptChange | None:
    kept = _kept_weights(facts)
    if not kept or (facts.rank.process.device == "cpu" and _drops_weights(facts, kept)):
        return None  # on a CPU torch's fused attention knows no dropout, and keeps all
    changes: list[tuple[float, int]] = []
    of_module: dict[str, set[tuple[int, int]]] = defaultdict(set)
    inside: set[tuple[str, int]] = (
        set()
    )  # what operators of the module allocate inside themselves, without a shape
    for save, shape in kept:
        of_module[save.module].add((math.prod(shape), shape[-1]))
        inside.add((save.module, save.size_bytes))
        weights = facts.calls.storages[save.storage_id]
        sums_bytes = math.prod(shape[:-1]) * _FLOAT32_BYTES
        changes += [
            (weights.birth_s, sums_bytes),
            (FOREVER_S if weights.death_s is None else weights.death_s, -sums_bytes),
        ]
    for storage in facts.calls.storages.values():
        shape = dimensions(storage.shape)
        is_like = bool(shape) and (math.prod(shape), shape[-1]) in of_module.get(storage.module, ())
        if is_like or (not storage.shape and (storage.module, storage.size_bytes) in inside):
            changes += moved_death(storage, storage.birth_s)
    saved_bytes = facts.peak_saved_bytes(changes)
    if not facts.is_worth(saved_bytes):
        return None
    most, _ = Counter(kind_of(save.module) for save, _ in kept).most_common(1)[0]
    of_micro_batch: Counter[int] = Counter()
    for save, _ in kept:
        of_micro_batch[save.micro_batch] += save.size_bytes
    kept_bytes = max(of_micro_batch.values())
    return ScriptChange(
        kind="attention_scores",
        seen=f"Attention in {most or 'the model'} keeps its weights for the backward, {format_bytes(kept_bytes)} in all: "
        f"batch x heads x length x length is {kept[0][0].shape}.",
        change="Call `torch.nn.functional.scaled_dot_product_attention`, which keeps none of them; in Hugging Face models that is "
        '`attn_implementation="sdpa"`.',
        peak_saved_bytes=saved_bytes,
        peak_is_rough=True,
        effect="not bit for bit the same",
    )


def _kept_weights(facts: Facts) -> list[tuple[Saved, tuple[int, ...]]]:
    """The softmaxes of square last dimensions that autograd keeps and a product of batches takes, each storage once."""
    multiplied = {
        save.storage_id for save in facts.calls.saves if save.operator in ("aten::bmm", "aten::baddbmm")
    }
    products = {
        (save.module, math.prod(dimensions(save.shape)))
        for save in facts.calls.saves
        if save.operator == "aten::bmm"
    }
    found: dict[int, tuple[Saved, tuple[int, ...]]] = {}
    for save in facts.calls.saves:
        shape = dimensions(save.shape)
        is_square = len(shape) >= 3 and shape[-1] == shape[-2] > 1
        if save.operator not in ("aten::_softmax", "aten::_safe_softmax") or not is_square:
            continue
        if save.storage_id in multiplied or (save.module, math.prod(shape)) in products:
            found.setdefault(save.storage_id, (save, shape))
    return list(found.values())


def _drops_weights(facts: Facts, kept: list[tuple[Saved, tuple[int, ...]]]) -> bool:
    """Whether as many random numbers are drawn at once as there are weights."""
    sizes = {math.prod(shape) for _, shape in kept}
    drawn = {operator.changes for operator in facts.calls.operators if operator.is_random}
    return any(
        math.prod(dimensions(storage.shape)) in sizes
        for storage in facts.calls.storages.values()
        if storage.storage_id in drawn or storage.operator == "aten::native_dropout"
    )
