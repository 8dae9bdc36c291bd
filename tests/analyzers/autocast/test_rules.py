"""The dtypes that operators compute in are those that torch's autocast has them compute in."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.analyzers.autocast.rules import Computes, computes, is_recurrent

NARROW, WIDE = torch.bfloat16, torch.float32


class Seen(TorchDispatchMode):
    """The dtypes of what each operator was given and gave first, by its name."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        given = [one.dtype for one in args if isinstance(one, torch.Tensor) and one.is_floating_point()]
        self.dtypes[func._schema.name] = (given, first.dtype)
        return out


def seen_on_cpu(call, *tensors):
    with torch.autocast("cpu", NARROW), Seen() as seen:
        call(*tensors)
    return seen.dtypes


def matrix(dtype, *shape):
    return torch.rand(*(shape or (8, 8))).to(dtype)


PICTURE = (2, 4, 6, 6)
CALLS = {
    "aten::mm": lambda dtype: (torch.mm, matrix(dtype), matrix(dtype)),
    "aten::addmm": lambda dtype: (F.linear, matrix(dtype), matrix(dtype), matrix(dtype, 8)),
    "aten::bmm": lambda dtype: (torch.bmm, matrix(dtype, 2, 4, 4), matrix(dtype, 2, 4, 4)),
    "aten::baddbmm": lambda dtype: (torch.baddbmm, *(matrix(dtype, 2, 4, 4) for _ in range(3))),
    "aten::convolution": lambda dtype: (F.conv2d, matrix(dtype, *PICTURE), matrix(dtype, 4, 4, 3, 3)),
    "aten::_log_softmax": lambda dtype: (lambda x: x.log_softmax(-1), matrix(dtype)),
    "aten::max_pool3d_with_indices": lambda dtype: (lambda x: F.max_pool3d(x, 2), matrix(dtype, 2, 4, 4, 4)),
    "aten::adaptive_max_pool3d": lambda dtype: (
        lambda x: F.adaptive_max_pool3d(x, 2),
        matrix(dtype, 2, 4, 4, 4),
    ),
    "aten::fractional_max_pool2d": lambda dtype: (
        lambda x: F.fractional_max_pool2d(x, 2, output_size=3),
        matrix(dtype, *PICTURE),
    ),
    "aten::upsample_bilinear2d": lambda dtype: (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        matrix(dtype, *PICTURE),
    ),
    "aten::logsumexp": lambda dtype: (lambda x: x.logsumexp(-1), matrix(dtype)),
    "aten::mse_loss": lambda dtype: (F.mse_loss, matrix(dtype), matrix(dtype)),
    "aten::_softmax": lambda dtype: (lambda x: x.softmax(-1), matrix(dtype)),
    "aten::gelu": lambda dtype: (F.gelu, matrix(dtype)),
    "aten::mul": lambda dtype: (torch.mul, matrix(dtype), matrix(dtype)),
    "aten::pow": lambda dtype: (lambda x: x.pow(2), matrix(dtype)),
    "aten::exp": lambda dtype: (torch.exp, matrix(dtype)),
    "aten::native_layer_norm": lambda dtype: (
        lambda x: F.layer_norm(x, (8,), torch.ones(8), torch.zeros(8)),
        matrix(dtype),
    ),
    "aten::native_group_norm": lambda dtype: (lambda x: F.group_norm(x, 2), matrix(dtype, *PICTURE)),
    "aten::reflection_pad2d": lambda dtype: (
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        matrix(dtype, *PICTURE),
    ),
    "aten::linalg_vector_norm": lambda dtype: (torch.linalg.vector_norm, matrix(dtype)),
    "aten::prod": lambda dtype: (torch.prod, matrix(dtype)),
    "aten::trace": lambda dtype: (torch.trace, matrix(dtype)),
    "aten::binary_cross_entropy": lambda dtype: (F.binary_cross_entropy, matrix(dtype), matrix(dtype)),
    "aten::cat": lambda dtype: (lambda x: torch.cat([x, x]), matrix(dtype)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_a_cpu_computes_as_the_rules_say(name, dtype):
    _, computed = seen_on_cpu(*CALLS[name](dtype))[name]
    wanted = {Computes.NARROW: NARROW, Computes.WIDE: WIDE}.get(computes(name, "cpu"), dtype)
    assert computed == wanted


@pytest.mark.parametrize("dtype", [NARROW, WIDE])
def test_inside_cross_entropy_a_cpu_has_the_logarithm_in_float32(dtype):
    seen = seen_on_cpu(F.cross_entropy, matrix(dtype), torch.zeros(8, dtype=torch.long))
    assert seen["aten::_log_softmax"][1] == WIDE
    assert computes("aten::_log_softmax", "cpu", "aten::nll_loss_forward") is Computes.WIDE


def test_a_gpu_has_other_lists():
    for name in (
        "upsample_bilinear2d",
        "upsample_nearest2d",
        "logsumexp",
        "linalg_vector_norm",
        "_fused_rms_norm",
    ):
        assert computes(f"aten::{name}", "cuda") is Computes.WIDE
    assert computes("aten::native_layer_norm", "cuda") is Computes.WIDE
    assert computes("aten::native_layer_norm", "cpu") is Computes.AS_FIRST
    assert computes("aten::_softmax", "cuda") is Computes.WIDE
    # Inside `cross_entropy`, which is on no list of theirs, it is told its dtype.
    assert computes("aten::_log_softmax", "cuda", "aten::nll_loss_forward") is Computes.AS_WIDEST
    assert computes("aten::_log_softmax", "cuda", "aten::mean") is Computes.WIDE


def test_attention_of_any_kernel_is_narrow_and_recurrent_layers_are_known():
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        assert computes(f"aten::_scaled_dot_product_{kernel}", "cuda") is Computes.NARROW
    assert is_recurrent("aten::_cudnn_rnn") and not is_recurrent("aten::mm")
