"""FLOPs of one operator: 2 per multiply-add of matrix products, convolutions, attention and recurrent layers.

Counted from shapes alone. A convolution's padding counts as if it were data, as everybody counts it. Fused
attention and recurrent layers tell apart what ran and what the model needs (flops_attention.py,
flops_recurrent.py); for all others the two are equal. torch.utils.flop_counter is not used: it counts 0 for
CPU attention (pytorch#195460) and recurrent layers, full squares for causal attention, and the weight gradient
of a grouped convolution as many times too large as there are groups.

What counts 0, and why:
- elementwise work, reductions, norms, softmax, dropout, pooling, resampling, embedding look-ups, sorting,
  optimizers' updates (also foreach and fused ones): no matrix arithmetic. A cdist that subtracts is of these;
  one that multiplies matrices is counted;
- FFTs and decompositions (solve, svd, cholesky): their work is no fixed number of multiply-adds;
- products of two sparse matrices: the work depends on where the zeros stand;
- generated kernels (Triton, C++) of torch.compile, and custom operators that are not listed here: nothing
  says what they compute. The matrix products that a compiled graph calls as operators are counted.
A semi-structured (2:4) sparse product counts as the dense one; complex numbers count like real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from memadvisor.capture.arguments import Arguments, Arithmetic, dense_values
from memadvisor.capture.flops_attention import ATTENTION
from memadvisor.capture.flops_recurrent import RECURRENT

_Counter = Callable[[Arguments], Arithmetic]
NO_ARITHMETIC = Arithmetic(0, 0, "")


def flop_counter(func: Any) -> _Counter | None:
    """What counts the FLOPs of an operator; None for one without matrix arithmetic."""
    return _COUNTERS.get((func.namespace, func._opname))


def depends_on_shapes_alone(func: Any) -> bool:
    """Whether two calls with equal shapes and numbers always cost the same."""
    return func._opname not in _BY_CONTENT


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Arithmetic:
    """What one call executed and the model needs. Shapes it was not made for raise, as Python does."""
    count = flop_counter(func)
    return NO_ARITHMETIC if count is None else count(Arguments(func, args, kwargs, out))


def _product(call: Arguments, left: torch.Tensor, right: torch.Tensor) -> Arithmetic:
    """(..., m, k) by (..., k, n): every element of the result takes k multiply-adds."""
    if left.layout != torch.strided or right.layout != torch.strided:
        return _sparse_product(left, right)
    flops = 2 * dense_values(call.result).numel() * int(left.shape[-1])
    return Arithmetic.all_needed(flops, left, right)


def _sparse_product(left: torch.Tensor, right: torch.Tensor) -> Arithmetic:
    """Each stored element of the sparse matrix is multiplied by a row or column of the dense one."""
    sparse = left if left.layout != torch.strided else right
    dense = right if sparse is left else left
    if dense.layout not in (torch.strided, torch.jagged):
        return NO_ARITHMETIC
    stored = sparse._values() if sparse.layout == torch.sparse_coo else sparse.values()
    if sparse.layout == torch.jagged:  # not sparse: rows of several lengths, one after the other
        dense, stored = right, dense_values(left)
        return Arithmetic.all_needed(2 * stored.numel() * int(right.shape[-1]), stored, right)
    width = dense.shape[-1] if dense is right else dense.shape[-2]
    return Arithmetic.all_needed(2 * stored.numel() * int(width), left, right)


def _of(left: str, right: str) -> _Counter:
    return lambda call: _product(call, call[left], call[right])


def _linear(left: str, weight: str) -> _Counter:
    """Weight is (n, k), or packed into a layout that has no rows: the result's width is n."""

    def count(call: Arguments) -> Arithmetic:
        rows = dense_values(call[left])
        flops = 2 * dense_values(call.result).numel() * int(rows.shape[-1])
        return Arithmetic.all_needed(flops, rows, call[weight])

    return count


def _grouped(call: Arguments) -> Arithmetic:
    """Rows of one matrix by the weights of their group; two 2-D matrices: groups of columns by groups of rows."""
    left, right = call["self"], call["mat2"]
    flops = 2 * call.result.numel() * int(left.shape[-1])
    if left.dim() == right.dim() == 2:
        flops //= max(1, int(call.result.shape[0]))
    return Arithmetic.all_needed(flops, left, right)


def _lists(call: Arguments) -> Arithmetic:
    pairs = zip(call["self"], call["mat2"], strict=True)
    flops = sum(2 * int(left.numel()) * int(right.shape[-1]) for left, right in pairs)
    return Arithmetic(flops, flops, "")


def _added_batches(call: Arguments) -> Arithmetic:
    left, right = call["batch1"], call["batch2"]
    return Arithmetic.all_needed(2 * left.numel() * int(right.shape[-1]), left, right)


def _matrix_vector(matrix: str, vector: str) -> _Counter:
    return lambda call: Arithmetic.all_needed(2 * call[matrix].numel(), call[matrix], call[vector])


def _outer(call: Arguments) -> Arithmetic:
    left, right = call["vec1"], call["vec2"]
    return Arithmetic.all_needed(2 * left.numel() * right.numel(), left, right)


def _sampled(call: Arguments) -> Arithmetic:
    """One product of a row and a column for each stored element of `self`."""
    left, right = call["mat1"], call["mat2"]
    return Arithmetic.all_needed(2 * call["self"].values().numel() * int(left.shape[-1]), left, right)


def _trilinear(call: Arguments) -> Arithmetic:
    """A sum of products of three factors: the second product and the sum are its multiply-add."""
    shapes = []
    for tensor, expand in (("i1", "expand1"), ("i2", "expand2"), ("i3", "expand3")):
        shape = list(call[tensor].shape)
        for position in sorted(call[expand]):
            shape.insert(position, 1)
        shapes.append(shape)
    flops = 2 * prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return Arithmetic(flops, flops, "")


def _euclidean(call: Arguments) -> Arithmetic:
    """Squares of norms are carried as two more columns of the product; distances need the others alone."""
    left, right = call["x1"], call["x2"]
    pairs = call.result.numel()
    width = int(left.shape[-1])
    return Arithmetic.of(2 * pairs * (width + 2), 2 * pairs * width, left, right)


def _convolution_flops(image: torch.Tensor, weight: torch.Tensor) -> int:
    """Each position of `image` (N, C, ...) meets every element of the weight once; groups are in its shape."""
    return 2 * int(image.shape[0]) * prod(int(size) for size in image.shape[2:]) * int(weight.numel())


def _convolution(source: str, weight: str, *, transposed: bool | None = None) -> _Counter:
    """The positions are the result's; of a transposed convolution they are the input's."""

    def count(call: Arguments) -> Arithmetic:
        is_transposed = call["transposed"] if transposed is None else transposed
        image = call[source] if is_transposed else call.result
        return Arithmetic.all_needed(_convolution_flops(image, call[weight]), call[source], call[weight])

    return count


def _convolution_backward(call: Arguments) -> Arithmetic:
    """Input gradient and weight gradient cost as much as the forward each; only what is asked for runs."""
    source = call["input"] if "input" in call else call["self"]
    transposed = call.get("transposed", False)
    mask = call.get("output_mask", (True, True))
    one = _convolution_flops(source if transposed else call["grad_output"], call["weight"])
    return Arithmetic.all_needed(one * (bool(mask[0]) + bool(mask[1])), source, call["weight"])


def _time_convolution(call: Arguments) -> Arithmetic:
    """(time, batch, channels); the weight is (width, in, out)."""
    source, weight = call["self"], call["weight"]
    positions = call.result.numel() // max(1, int(weight.shape[2]))
    return Arithmetic.all_needed(2 * positions * weight.numel(), source, weight)


def _time_convolution_backward(call: Arguments) -> Arithmetic:
    gradient, weight = call["self"], call["weight"]
    positions = gradient.numel() // max(1, int(weight.shape[2]))
    return Arithmetic.all_needed(2 * 2 * positions * weight.numel(), call["input"], weight)


_ATEN: dict[str, _Counter] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_scaled_mm_v2"), _of("self", "mat2")),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "_sparse_addmm"), _of("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "baddbmm_"), _of("batch1", "batch2")),
    **dict.fromkeys(("addbmm", "addbmm_"), _added_batches),
    "matmul": _of("self", "other"),
    "_sparse_mm": _of("sparse", "dense"),
    "hspmm": _of("mat1", "mat2"),
    "sspaddmm": _of("mat1", "mat2"),
    "sparse_sampled_addmm": _sampled,
    "linear": _linear("input", "weight"),
    "mkldnn_linear": _linear("self", "weight"),
    "_mixed_dtypes_linear": _linear("input", "weight"),
    "_sparse_semi_structured_linear": _linear("input", "weight"),
    **dict.fromkeys(
        (
            "_weight_int8pack_mm",
            "_weight_int4pack_mm",
            "_weight_int4pack_mm_for_cpu",
            "_weight_int4pack_mm_with_scales_and_zeros",
        ),
        _linear("self", "mat2"),
    ),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    "_foreach_mm": _lists,
    "mv": _matrix_vector("self", "vec"),
    **dict.fromkeys(("addmv", "addmv_"), _matrix_vector("mat", "vec")),
    "dot": _matrix_vector("self", "tensor"),
    "vdot": _matrix_vector("self", "other"),
    **dict.fromkeys(("addr", "addr_"), _outer),
    "_trilinear": _trilinear,
    "_euclidean_dist": _euclidean,
    **dict.fromkeys(
        ("convolution", "_convolution", "convolution_overrideable"), _convolution("input", "weight")
    ),
    **dict.fromkeys(
        (
            "cudnn_convolution",
            "cudnn_convolution_relu",
            "cudnn_convolution_add_relu",
            "mkldnn_convolution",
            "miopen_convolution",
            "miopen_depthwise_convolution",
            "_slow_conv2d_forward",
            "slow_conv3d_forward",
            "slow_conv_dilated2d",
            "slow_conv_dilated3d",
            "_conv_depthwise2d",
            "conv_depthwise3d",
        ),
        _convolution("self", "weight", transposed=False),
    ),
    **dict.fromkeys(
        (
            "cudnn_convolution_transpose",
            "miopen_convolution_transpose",
            "slow_conv_transpose2d",
            "slow_conv_transpose3d",
        ),
        _convolution("self", "weight", transposed=True),
    ),
    **dict.fromkeys(
        ("convolution_backward", "convolution_backward_overrideable", "_slow_conv2d_backward"),
        _convolution_backward,
    ),
    "conv_tbc": _time_convolution,
    "conv_tbc_backward": _time_convolution_backward,
    **RECURRENT,
}

# Lengths of packed sequences, and which gradients the graph wants, are no shapes.
_BY_CONTENT = frozenset(
    (
        "mkldnn_rnn_layer_backward",
        *(
            f"_{kind}_attention_{way}"
            for kind in ("flash", "efficient", "cudnn")
            for way in ("forward", "backward")
        ),
        "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward",
    )
)

_COUNTERS: dict[tuple[str, str], _Counter] = {
    **{("aten", name): count for name, count in _ATEN.items()},
    **ATTENTION,
    # What compiled graphs call on CPU.
    ("mkldnn", "_linear_pointwise"): _linear("X", "W"),
    ("mkl", "_mkl_linear"): _linear("X", "ORI_W"),
    ("mkldnn", "_convolution_pointwise"): _convolution("X", "W", transposed=False),
    ("mkldnn", "_convolution_transpose_pointwise"): _convolution("X", "W", transposed=True),
}
