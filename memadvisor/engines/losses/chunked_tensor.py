"""The output of a model's last layer, and what a loss makes of it, worked out for a chunk of rows at a time.

A language model's logits are (tokens, vocabulary): with their copy in float32, its log-softmax, and the gradients of both
often more than all else that a step holds. A cross entropy needs none of them whole. So the layer returns a tensor without
memory that knows what its values are (expressions.py). torch runs the script's own operators on it, and records their
backwards, as on any other; below autograd an operator that takes rows apart from each other makes another such tensor, and
one that makes little of a row (a loss, a sum, an argmax) is run on chunks (chunked_operators.py). In the backward gradients
are such tensors too, until they arrive at the layer (chunked_layer.py). So it is the script's own loss, with its settings,
whatever it is made of; only sums over rows are added up in another order, and the product is done once more.

Whatever else the script does with such a tensor is done on whole values, which are made then and there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeGuard

import torch
from torch.utils._pytree import tree_map_only

from memadvisor.engines.losses.expressions import Expression, whole

# Told of the operator that needed whole values.
Told = Callable[[str], None]
# What hands a tensor to something that is not torch, and what else shows its memory.
_LEAVING = ("numpy", "tolist", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__")
_REVEALING = {
    *_LEAVING,
    *("data_ptr", "untyped_storage", "storage", "_typed_storage", "item", "__repr__", "__format__"),
    *("share_memory_", "is_shared", "__cuda_array_interface__"),
    *("__float__", "__int__", "__bool__", "__index__"),
}


class ChunkedTensor(torch.Tensor):
    """See the top of this file.

    functions, run_operator: what functions and operators do on it, set by chunked_functions.py and chunked_operators.py.
    expression: its values, by rows: `class_dim` aside, its dimensions are positions.
    parent, view_of: the tensor whose memory it would share, and how. whole_values: once somebody needed it whole.
    """

    functions: ClassVar[dict[Any, Callable[..., Any]]] = {}
    run_operator: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    expression: Expression
    class_dim: int
    num_rows: int  # of a chunk
    told: Told
    parent: ChunkedTensor | None
    view_of: Callable[[torch.Tensor], torch.Tensor] | None
    whole_values: torch.Tensor | None
    has_views: bool

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, expression: Expression, num_rows: int, told: Told, class_dim: int = -1
    ) -> ChunkedTensor:
        """`like`: has its shape, strides and dtype."""
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=expression.device
        )
        tensor.expression = expression
        tensor.num_rows = num_rows
        tensor.told = told
        tensor.class_dim = class_dim % like.dim()
        tensor.parent = tensor.view_of = tensor.whole_values = None
        tensor.has_views = False
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def is_by_rows(self) -> bool:
        """Whether its last dimension is the one that operators take whole."""
        return self.class_dim == self.dim() - 1

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            own = cls.functions.get(func)
            if own is not None:
                return own(func, *args, **kwargs)
            name = getattr(func, "__name__", "")
            if name in _REVEALING:
                args, kwargs = tree_map_only(ChunkedTensor, lambda tensor: tensor.shown(name), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types its `func` and `types` loosely
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # An operator of the script's that autocast has cast already.
        with torch._C._DisableAutocast():
            return cls.run_operator(func, args, kwargs or {})

    # ---- whole values ------------------------------------------------------------------------

    @property
    def is_made(self) -> bool:
        """Whether its values are in memory, where whoever reads or writes finds them."""
        return self.whole_values is not None or (self.parent is not None and self.parent.is_made)

    def made(self, operator: str) -> torch.Tensor:
        """Its values, from now on in memory, which its views share."""
        if self.whole_values is None:
            if self.parent is not None and self.view_of is not None:
                self.whole_values = self.view_of(self.parent.made(operator))
            else:
                self.whole_values = self.copy(operator)
        return self.whole_values

    def copy(self, operator: str) -> torch.Tensor:
        """Its values in memory that nothing else knows of."""
        self.told(operator)
        rows = whole(self.expression, self.num_rows)
        lead = [size for dim, size in enumerate(self.shape) if dim != self.class_dim]
        made = rows.view(*lead, rows.shape[-1]).movedim(-1, self.class_dim)
        if made.stride() == self.stride() or not (self.parent is None or self.is_contiguous()):
            return made
        # Kernels, torch's and others', go by the strides that the tensor has said it has.
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device).copy_(
            made
        )

    def read(self, operator: str) -> torch.Tensor:
        """Its values for one that only reads them: kept for the next one, where they are a tensor of their own."""
        return self.made(operator) if self.is_made or self.parent is None else self.copy(operator)

    def shown(self, name: str) -> torch.Tensor:
        return self.made(name).detach()


def _of_whole_values(name: str) -> Callable[..., Any]:
    def method(self: ChunkedTensor, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return getattr(self.shown(name), name)(*args, **kwargs)

    return method


# Where torch calls the script back (hooks of saved tensors), functions on it are not told of.
for _name in _LEAVING:
    setattr(ChunkedTensor, _name, _of_whole_values(_name))


def is_chunked(value: Any) -> TypeGuard[ChunkedTensor]:
    return type(value) is ChunkedTensor
