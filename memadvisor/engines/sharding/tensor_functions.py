"""What a function of tensors asks of its arguments, told by its name: values, or what is known without them.

Parameters whose values are not here (released.py), are coming (arrivals.py) or lie on several ranks (late.py) are given a
class whose `__torch_function__` asks this of each function that the script calls on them.
"""

from __future__ import annotations

from typing import Any

# What can be answered without the values.
_GETTERS = {
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "is_leaf", "grad_fn", "names"),
    *("is_cuda", "is_cpu", "is_sparse", "is_sparse_csr", "is_meta", "is_quantized", "is_mkldnn", "is_nested"),
    *("itemsize", "nbytes", "_version", "_base", "output_nr", "retains_grad", "is_xpu", "is_mps", "is_xla"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "_grad", "is_vulkan", "is_ipu", "is_maia", "is_mtia"),
    "grad_dtype",
}
_SETTERS = {
    *("requires_grad", "grad", "_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "names"),
    "grad_dtype",
}
_METHODS = {
    *("size", "numel", "nelement", "dim", "ndimension", "element_size", "is_floating_point", "is_complex"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "untyped_storage", "__len__"),
    *("get_device", "is_signed", "__hash__", "is_same_size", "retain_grad", "is_inference", "_is_view"),
    *("has_names", "is_conj", "is_neg", "storage_type"),
}


def name_of(func: Any) -> str:
    """A method's name, or that of the attribute that is read."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name


def needs_no_values(func: Any) -> bool:
    """Whether a function of tensors can be answered without the values of its arguments."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute in (_GETTERS if name == "__get__" else _SETTERS)
    return name in _METHODS


def is_writing(func: Any) -> bool:
    """Whether a function of tensors changes its first argument."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and not name.startswith("_")
    return in_place or name in ("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
