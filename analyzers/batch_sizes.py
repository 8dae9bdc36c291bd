"""What a storage's shape tells: whether it shrinks with the micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import prod

from memadvisor.analyzers.inner_workspaces import INSIDE, workspaces
from memadvisor.analyzers.lstm_workspaces import lstm_workspaces
from memadvisor.analyzers.shapes import dimensions
from memadvisor.analyzers.slow_convolutions import slow_modules, slow_workspaces
from memadvisor.run.records import Step, Storage
from memadvisor.run.run import RankRun

_CAST = f"{INSIDE}aten::_to_copy"
_OTHER_WIDTHS = (0.25, 0.5, 2, 4)  # of a number, as a multiple of what it takes
_KEPT = ("parameter", "gradient", "optimizer_state", "communication")
_MOST_DIMENSIONS = 7
# Recurrent layers keep what their backward needs of every sample and time as bytes without a shape of their own.
_OF_EVERY_SAMPLE = ("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn")


def shrink_batch(rank: RankRun, step: Step, divisor: int | Fraction) -> dict[int, int]:
    """New sizes, by storage, with micro-batches of 1/divisor of their size; below 1 they grow.

    A storage born in the step shrinks where its first or second dimension is the micro-batch's samples,
    its tokens, its tokens that have a next one (one less a sample: the logits of a shifted loss), or its samples times
    other dimensions that a tensor of samples has (`_flattened`), and its
    shape is no parameter's; one born before does where the script drops it in this step for another like it, as it
    does with the last step's logits. What an operator made for itself has no shape; of convolutions and recurrent layers
    it shrinks as their own shapes say (inner_workspaces.py), of others where it is as large as one that does and as
    nothing else (a copy in another dtype, as a mean of bfloat16 makes, has as many numbers), or as nothing else that the
    operator has made in the module. Where a convolution takes another algorithm with fewer samples, it makes other things
    (slow_convolutions.py); what an LSTM keeps has a law (lstm_workspaces.py). Whatever else has no recorded shape keeps its
    size, so the step is never made smaller than it is known to become. For the same reason all that is born in a forward
    or backward grows, but for what has the shape of a parameter; so do batches that were there before.
    """
    if divisor == 1 or step.num_samples is None:
        return {}
    weights = _weights(rank)
    if divisor < 1:
        return {
            row.storage_id: -(-row.size_bytes // divisor)
            for row in rank.storages
            if (row.phase not in ("baseline", "optimizer") or row.category == "input")
            and row.category not in _KEPT
            and (not row.shape or dimensions(row.shape) not in weights)
        }
    sizes = {size for size in _batch_sizes(rank, step, weights) if size % divisor == 0}
    stacks = _stacks(rank, step, weights, divisor)
    shrinking = {
        row.storage_id: row
        for row in rank.storages
        if _has_batch(row, sizes, weights) or (_may_shrink(row) and dimensions(row.shape) in stacks)
    }
    outlasting = {(row.size_bytes, row.dtype) for row in shrinking.values() if row.death_s is None}
    shrinking |= {
        row.storage_id: row
        for row in rank.storages
        if row.phase == "baseline" and row.death_s is not None and (row.size_bytes, row.dtype) in outlasting
        if _has_batch(replace(row, phase=""), sizes, weights)
    }
    own = _made_inside(rank, shrinking, sizes)
    whole = {
        row.storage_id: row.size_bytes
        for row in rank.storages
        if row.storage_id in shrinking or row.storage_id in own
    }
    going = {number: own.get(number, size_bytes) for number, size_bytes in whole.items()}
    shrunk = {
        number: whole[number] - going[number] + -(-going[number] // divisor)
        for number in going
        if going[number]
    }
    return shrunk | slow_workspaces(rank, divisor, sizes) | lstm_workspaces(rank, divisor, sizes)


def slow_convolutions(rank: RankRun, step: Step, divisor: int | Fraction) -> set[str]:
    """Modules whose convolutions take another algorithm with micro-batches of 1/divisor of their size."""
    return slow_modules(rank, divisor, _batch_sizes(rank, step, _weights(rank))) if divisor > 1 else set()


def _weights(rank: RankRun) -> set[tuple[int, ...]]:
    """Shapes of parameters, as they are and transposed."""
    shapes = {dimensions(parameter.shape) for parameter in rank.parameters}
    return shapes | {shape[::-1] for shape in shapes}


def _made_inside(rank: RankRun, shrinking: Mapping[int, Storage], sizes: Set[int]) -> dict[int, int]:
    """What operators made for themselves and shrinks, by storage: how much of it does."""
    rest = [row for row in rank.storages if row.storage_id not in shrinking]
    shaped = [row for row in rest if row.shape]
    alike = {row.size_bytes for row in shrinking.values()} - {row.size_bytes for row in shaped}
    cast = _cast(shrinking.values()) - _cast(shaped)
    made = set(map(_made, shrinking.values())) - set(map(_made, shaped))
    own = workspaces(rank, {dimensions(row.shape) for row in shrinking.values()}, sizes)
    for row in rest:
        is_inside = row.storage_id not in own and row.operator.startswith(INSIDE)
        is_cast = row.operator == _CAST and row.size_bytes in cast
        if is_inside and (is_cast or row.size_bytes in alike or _made(row) in made):
            own[row.storage_id] = row.size_bytes
    return own


def _cast(rows: Iterable[Storage]) -> set[int]:
    """How large copies of these are in dtypes of other widths."""
    return {int(row.size_bytes * factor) for row in rows for factor in _OTHER_WIDTHS}


def _made(row: Storage) -> tuple[str, str, int]:
    """By whom, and how large."""
    return row.module, row.operator.removeprefix(INSIDE), row.size_bytes


def _batch_sizes(rank: RankRun, step: Step, weights: Set[tuple[int, ...]]) -> set[int]:
    """Dimensions that shrink with the micro-batch."""
    num_micro_batches = max(1, step.num_micro_batches)
    samples = (step.num_samples or 0) // num_micro_batches
    sizes = {samples}
    if step.num_tokens is not None:
        tokens = step.num_tokens // num_micro_batches
        sizes |= {tokens, tokens - samples}
    sizes -= {0, 1}
    return sizes | (_flattened(rank, samples, weights) if samples > 1 else set())


def _flattened(rank: RankRun, samples: int, weights: Set[tuple[int, ...]]) -> set[int]:
    """Samples times other dimensions of a tensor of samples: the rows of a linear layer over images' patches, the
    matrices of a batched product of attention. None that is a dimension itself, of such a tensor or of a parameter."""
    of_samples = _of_samples(rank, samples, weights)
    own = {size for shape in (*of_samples, *weights) for size in shape}
    return _products(of_samples, samples) - {samples} - own


def _stacks(
    rank: RankRun, step: Step, weights: Set[tuple[int, ...]], divisor: int | Fraction
) -> set[tuple[int, ...]]:
    """Shapes of tensors that are stacked, as nn.MultiheadAttention does: three of [time, samples, width], and matrices of all
    samples and heads, also where these are as many as a width of the model (as many samples as a head has channels). None
    of the latter has as many elements as a parameter: it may be one."""
    samples = (step.num_samples or 0) // max(1, step.num_micro_batches)
    if samples < 2 or samples % divisor:
        return set()
    shapes = {dimensions(row.shape) for row in rank.storages if row.phase != "baseline"} - weights
    in_time = {shape for shape in shapes if len(shape) == 3 and shape[1] == samples}
    widths = {(shape[0], prod(shape[1:])) for shape in in_time}
    heads = {s[1] for s in shapes if len(s) == 3 and s[1] % samples == 0 and (s[0], prod(s[1:])) in widths}
    folded = (heads - {samples}) | _products(_of_samples(rank, samples, weights), samples)
    elements = {prod(shape) for shape in weights}
    matrices = {s for s in shapes if len(s) == 3 and not folded.isdisjoint(s[:2]) and prod(s) not in elements}
    return matrices | {shape for shape in shapes if len(shape) == 4 and shape[1:] in in_time}


def _of_samples(rank: RankRun, samples: int, weights: Set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Shapes of tensors of samples, of which these are the first dimension, without it."""
    shapes = {dimensions(row.shape)[:_MOST_DIMENSIONS] for row in rank.storages if row.phase != "baseline"}
    return {shape[1:] for shape in shapes if shape[:1] == (samples,)} - {shape[1:] for shape in weights}


def _products(of_samples: Iterable[tuple[int, ...]], samples: int) -> set[int]:
    return {
        samples * prod(chosen)
        for shape in of_samples
        for count in range(1, len(shape) + 1)
        for chosen in combinations(shape, count)
    }


def _has_batch(row: Storage, sizes: Set[int], weights: Set[tuple[int, ...]]) -> bool:
    shape = dimensions(row.shape)
    if not _may_shrink(row) or not shape or shape in weights:
        return False
    if row.operator in _OF_EVERY_SAMPLE and row.dtype == "uint8":
        return True
    return not sizes.isdisjoint(shape[:2])


def _may_shrink(row: Storage) -> bool:
    return row.phase != "baseline" and row.category not in _KEPT
