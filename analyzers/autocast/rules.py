"""In which dtype autocast has operators compute, by the names that they have beneath it.

The lists are torch's (`aten/src/ATen/autocast_mode.h`, and the page "Automatic Mixed Precision package" of its
documentation): of what they name, autocast casts the operands, and the operators that these are made of run in that dtype.
All others take what they are given; of several dtypes the widest.
"""

from __future__ import annotations

from enum import Enum


class Computes(Enum):
    NARROW = "narrow"
    WIDE = "wide"
    AS_FIRST = "as its first operand"
    AS_WIDEST = "as its widest operand"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NARROW = _names(
    "mm addmm addmv addr mv bmm baddbmm addbmm linalg_vecdot dot vdot convolution _convolution cudnn_convolution "
    "mkldnn_convolution conv_tbc _prelu_kernel linear mkldnn_linear _addmm_activation"
)
_ATTENTION = "_scaled_dot_product_"
_WIDE = _names(
    "nll_loss_forward nll_loss2d_forward binary_cross_entropy binary_cross_entropy_with_logits mse_loss smooth_l1_loss "
    "huber_loss soft_margin_loss multi_margin_loss multilabel_margin_loss_forward _ctc_loss prod _cdist_forward "
    "_pdist_forward"
)
_WIDE_ON_CPU = _names(
    "avg_pool3d _adaptive_avg_pool3d max_pool3d_with_indices adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d "
    "grid_sampler_2d grid_sampler_3d polar reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d replication_pad3d max_unpool2d max_unpool3d trace linalg_inv_ex "
    "linalg_cholesky_ex linalg_qr _linalg_svd _linalg_eigh _linalg_solve_ex _fft_r2c _fft_c2r _fft_c2c"
)
_WIDE_ON_GPU = _names(
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan pow softplus _softmax "
    "native_layer_norm native_group_norm _fused_rms_norm cumprod cumsum sum renorm norm linalg_vector_norm logsumexp "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
)
_AS_FIRST = _names(
    "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "cudnn_batch_norm miopen_batch_norm _fused_rms_norm"
)
# What they make for themselves in 16 bits is not known.
_RECURRENT = _names(
    "mkldnn_rnn_layer _cudnn_rnn miopen_rnn _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm gru"
)
# On CPUs, of what is bfloat16, these make a copy in float32 for as long as they run.
_WIDE_COPY_OF_OPERAND = ("mean",)
_WIDE_COPY_OF_RESULT = ("gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce")
_LOG_SOFTMAX, _NLL_LOSSES = "aten::_log_softmax", ("aten::nll_loss_forward", "aten::nll_loss2d_forward")


def is_attention(name: str) -> bool:
    return name.removeprefix("aten::").startswith(_ATTENTION)


def is_recurrent(name: str) -> bool:
    return name.removeprefix("aten::") in _RECURRENT


def computes(name: str, device_type: str, following: str = "") -> Computes:
    """Of an operator by its recorded name (`aten::mm`), on a device of this type (`cuda`, `cpu`), with what comes next.

    The logarithm of a softmax is on the list of GPUs, where `cross_entropy` is not, and tells it in which dtype to be; on CPUs
    `cross_entropy` is, and the logarithm alone is not.
    """
    if name == _LOG_SOFTMAX:
        is_wide = (following in _NLL_LOSSES) == (device_type == "cpu")
        return Computes.WIDE if is_wide else Computes.AS_WIDEST
    name = name.removeprefix("aten::")
    if name in _NARROW or is_attention(name):
        return Computes.NARROW
    if name in _WIDE or name in (_WIDE_ON_CPU if device_type == "cpu" else _WIDE_ON_GPU):
        return Computes.WIDE
    return Computes.AS_FIRST if name in _AS_FIRST else Computes.AS_WIDEST


def computes_without(name: str) -> Computes:
    """Where autocast is off: of several dtypes in the widest, for products take none but one."""
    return Computes.AS_FIRST if name.removeprefix("aten::") in _AS_FIRST else Computes.AS_WIDEST


def has_wide_operand_inside(name: str, device_type: str) -> bool:
    """Whether, of bfloat16, the operator works on a copy of its first operand in float32 that it makes for itself."""
    return device_type == "cpu" and name.removeprefix("aten::") in _WIDE_COPY_OF_OPERAND


def has_wide_result_inside(name: str, device_type: str) -> bool:
    """Whether, of bfloat16, the operator gathers its result in float32 first."""
    return device_type == "cpu" and name.removeprefix("aten::") in _WIDE_COPY_OF_RESULT
