"""How many samples, and tokens, a model is called with, as far as its inputs tell."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memadvisor.capture.tensor_storage import is_without_shape

# What libraries of graphs hand over in place of tensors has one of these: torch_geometric's Data, DGL's DGLGraph,
# torch_sparse's SparseTensor.
_OF_GRAPHS = ("num_nodes", "sparse_sizes")


@dataclass(slots=True)
class SeenBatches:
    """What the models of one step were given: the very tensors, as they were written last."""

    num_repeated: int = 0
    _seen: dict[tuple[str, int], tuple[weakref.ref[torch.Tensor], int, int]] = field(default_factory=dict)

    def is_repeated(
        self, model: str, args: Sequence[Any], kwargs: Mapping[str, Any], micro_batch: int
    ) -> bool:
        """Whether the model has had this first tensor before in the step; counted where a backward lies between."""
        values = (*args, *kwargs.values())
        first = next((value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0), None)
        if first is None or first.is_inference():
            return False
        known = self._seen.get((model, id(first)))
        version = first._version  # a buffer that is filled anew holds another batch
        if known is None or known[0]() is not first or known[1] != version:
            self._seen[model, id(first)] = weakref.ref(first), version, micro_batch
            return False
        self.num_repeated += known[2] != micro_batch
        return True


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Samples are the first dimension of the first input, tokens the elements of a 2-D whole-number one.

    None for what is not known: without a tensor, under `torch.func.vmap`, where one call is many, and where another input
    says that the first one's rows are the nodes of a graph. Of these half a batch is no smaller graph, and nobody knows how many graphs there are.
    """
    values = (*args, *kwargs.values())
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    if not tensors or any(hasattr(type(value), name) for value in values for name in _OF_GRAPHS):
        return None, None
    first = tensors[0]
    if _is_mapped(first):
        return None, None
    if is_without_shape(first):
        return first.size(0), None
    tensors = [tensor for tensor in tensors if not is_without_shape(tensor)]
    if any(_links_rows(first, other) for other in tensors[1:]):
        return None, None
    return first.shape[0], first.numel() if not first.is_floating_point() and first.dim() == 2 else None


def _is_mapped(tensor: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _links_rows(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the two are the features of a graph's nodes, [N, ...], and its edges, in either order: pairs of rows, [2, E],
    or a matrix of [N, N], sparse or beside features of [N, F]."""
    if first.shape[0] != 2 and _may_be_pairs(other):
        return True
    if _may_be_pairs(first) and other.is_floating_point() and other.shape[0] not in (2, first.shape[1]):
        return True
    return any(
        matrix.shape == (features.shape[0],) * 2 != features.shape
        and (matrix.layout is not torch.strided or (features.dim() == 2 and features.is_floating_point()))
        for matrix, features in ((first, other), (other, first))
    )


def _may_be_pairs(tensor: torch.Tensor) -> bool:
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    return is_whole and tensor.dim() == 2 and tensor.shape[0] == 2
