"""What a storage's shape tells: whether it shrinks with the micro-batch, whether it is a cast weight."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

from memadvisor.run.records import Parameter, Step, Storage
from memadvisor.run.run import RankRun

_SHAPE = re.compile(r"\d+")
_KEPT = ("parameter", "gradient", "optimizer_state", "communication")


def dimensions(shape: str) -> tuple[int, ...]:
    """The whole numbers of a shape as it was recorded: `[8, 128]` or `(8, 128)`."""
    return tuple(int(number) for number in _SHAPE.findall(shape))


def shrink_batch(rank: RankRun, step: Step, divisor: int | Fraction) -> dict[int, int]:
    """New sizes, by storage, with micro-batches of 1/divisor of their size; below 1 they grow.

    A storage born in the step shrinks where its first or second dimension is the micro-batch's samples,
    its tokens, or its tokens that have a next one (one less a sample: the logits of a shifted loss), and its
    shape is no parameter's. What has no recorded shape keeps its size, so the step is never
    made smaller than it is known to become. For the same reason all that is born in a forward or backward grows, but for
    what has the shape of a parameter.
    """
    if divisor == 1 or step.num_samples is None:
        return {}
    num_micro_batches = max(1, step.num_micro_batches)
    per_batch = {step.num_samples // num_micro_batches}
    if step.num_tokens is not None:
        per_batch.add(step.num_tokens // num_micro_batches)
        per_batch.add((step.num_tokens - step.num_samples) // num_micro_batches)
    per_batch -= {0, 1}
    weights = {dimensions(parameter.shape) for parameter in rank.parameters}
    weights |= {shape[::-1] for shape in weights}
    if divisor < 1:
        return {
            row.storage_id: -(-row.size_bytes // divisor)
            for row in rank.storages
            if row.phase not in ("baseline", "optimizer")
            and row.category not in _KEPT
            and (not row.shape or dimensions(row.shape) not in weights)
        }
    return {
        row.storage_id: -(-row.size_bytes // divisor)
        for row in rank.storages
        if _has_batch(row, per_batch, weights, divisor)
    }


def is_weight_cast(row: Storage, parameters: Iterable[Parameter]) -> bool:
    """Whether a storage is the copy of a parameter of its unit in another dtype, as autocast makes them."""
    return row.operator == "aten::_to_copy" and any(
        parameter.unit == row.unit and parameter.dtype != row.dtype and parameter.shape == row.shape
        for parameter in parameters
    )


def _has_batch(
    row: Storage, per_batch: set[int], weights: set[tuple[int, ...]], divisor: int | Fraction
) -> bool:
    shape = dimensions(row.shape)
    if row.phase == "baseline" or row.category in _KEPT or not shape or shape in weights:
        return False
    return any(size in per_batch and size % divisor == 0 for size in shape[:2])
