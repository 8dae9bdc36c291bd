"""Bytes that autograd keeps of a layer that is written operator by operator, as Hugging Face's classes are: no kernel does
two things at once, so that what passes from one to the next is kept where either's backward needs it.

`Architecture.reference_code` says what differs from class to class. tests/cost/layouts/test_saved_reference.py compares
every term with captures of the real classes.
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.saved_autocast import fp32_norm_bytes


def residual_bytes(model: Architecture, norms: int, sublayers: int, *, wide: float = 1.0) -> float:
    """Of an element of the residual stream: what its norms keep, the masks of the dropouts behind `sublayers`, and their results where
    a vector scales them. Norms
    more than sublayers are behind them, and the sum that takes their results keeps nothing. `wide`: of how many times two
    bytes the elements are; what is said is then of two, and so it is of the others. An RMSNorm need not copy what is in
    fp32.
    """
    code = model.reference_code
    behind = max(0, norms - sublayers)
    norm_bytes = code.norm_bytes if wide == 1 else 2.0 + fp32_norm_bytes(model) / wide
    scaled = 2.0 * sublayers * model.scales_parts
    return norms * norm_bytes - 2.0 * behind + (sublayers / wide if code.residual_dropout else 0) + scaled


def head_norm_bytes(model: Architecture, *, wide: float = 1.0) -> float:
    """Of an element of queries and keys where they have norms of their own, whose results the rotary positions drop."""
    if not model.qk_norm:
        return 0.0
    return model.reference_code.norm_bytes - 2.0 if wide == 1 else fp32_norm_bytes(model) / wide


def score_bytes(model: Architecture, *, is_fp32: bool) -> float:
    """Of a score in memory: the softmax's result; its copy in two bytes where it is fp32, which the product with the values
    keeps; with dropout the mask, and its result in place of that copy.
    """
    code = model.reference_code
    softmax = 4.0 if is_fp32 else 2.0
    if code.score_dropout:
        return softmax + 1.0 + 2.0
    return softmax + (2.0 if is_fp32 else 0.0)


def ffn_column_bytes(model: Architecture, *, wide: float = 1.0) -> float:
    """Of an inner column: what the activation function keeps, its result where a gate multiplies it or nothing comes after,
    the gate's other operand, and the input of the second product with the mask of a dropout before it.
    """
    code = model.reference_code
    kept = 2.0 * code.activation_tensors
    if model.gated_mlp:
        kept += 4.0
    elif code.inner_dropout and code.activation_tensors == 0:
        kept += 2.0  # relu's backward is from its result, which the dropout parts from the product's input
    return kept + 2.0 + (1.0 / wide if code.inner_dropout else 0.0)
