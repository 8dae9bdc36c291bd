"""How many samples, and tokens, a model is called with, as far as its inputs tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from memadvisor.capture.tensor_storage import is_without_shape

# What libraries of graphs hand over in place of tensors has one of these: torch_geometric's Data, DGL's DGLGraph,
# torch_sparse's SparseTensor.
_OF_GRAPHS = ("num_nodes", "sparse_sizes")
_MOST_VALUES = 100
_OF_LENGTHS = (torch.nn.RNNBase, torch.nn.MultiheadAttention, torch.nn.Transformer)


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


@dataclass(slots=True)
class FirstBatch:
    """Tells how many samples the first batch has that a backward is of: two samples on which a library tries a network out
    are none. `tell` is asked with each backward's until it says that it has been told."""

    tell: Callable[[int], bool] | None = None
    _given: dict[str, int] = field(default_factory=dict)  # by model, the last call's

    def see_call(self, model: str, num_samples: int) -> None:
        if self.tell is not None:
            self._given[model] = num_samples

    def see_backward(self) -> None:
        if self._given:
            if self.tell is not None and self.tell(next(iter(self._given.values()))):
                self.tell = None
            self._given.clear()


@dataclass(slots=True)
class LengthFirst:
    """Which batches are [length, samples, ...]: those whose first two dimensions a model hands on to a recurrent or
    attention layer of torch's that takes them in this order (`batch_first=False`). Learnt in the traced step."""

    _shapes: set[torch.Size] = field(
        default_factory=set
    )  # [length, samples] of layers, in the call under way
    _models: set[str] = field(default_factory=set)

    def see_layer(self, module: torch.nn.Module, args: Any) -> None:
        if takes_length_first(module):
            given = args[0] if isinstance(args, tuple) and args else None
            if isinstance(given, torch.Tensor) and not is_without_shape(given) and given.dim() == 3:
                self._shapes.add(given.shape[:2])

    def leave_model(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """A call of the model has ended; whether its first input is one of these."""
        if self._shapes and name not in self._models:
            first = next(iter(_shaped((*args, *kwargs.values()))), None)
            if first is not None and first.dim() > 1 and first.shape[:2] in self._shapes:
                self._models.add(name)
        self._shapes.clear()
        return name in self._models


def takes_length_first(module: torch.nn.Module) -> bool:
    """Whether it is a layer that takes [length, samples, ...]."""
    return isinstance(module, _OF_LENGTHS) and not module.batch_first


def batch_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, is_length_first: bool = False
) -> tuple[int | None, int | None]:
    """Samples are the first dimension of the first input, or of all in a dictionary, tokens the elements of a 2-D
    whole-number one; a single number a sample is a class of it. Of a list of dictionaries of tokens, the sides of pairs of
    sentences, each has a row for a pair, and all tokens count. A batch's number beside a list says that the list is the batch,
    as Lightning hands it through DistributedDataParallel. Of a list of images, with a dictionary of what is in each
    beside, or of many sizes, they are the images. Numpy's arrays are asked where there is no tensor.

    `is_length_first`: samples are the second dimension. A float vector is no batch: one sample's features, or a number
    beside each of another input's samples. None for what is not known: without a tensor, under `torch.func.vmap`, where
    one call is many, and where another input says that the first one's rows are the nodes of a graph. Of these half a
    batch is no smaller graph, and nobody knows how many graphs there are.
    """
    values = (*args, *kwargs.values())
    plain = _shaped(values) or _of_numbered_batch(values)
    sides = [plain] if plain else _alike_in_dictionaries(values)
    tensors = [tensor for side in sides for tensor in side]
    if not tensors:
        known = (_images_with_targets(values), _images_of_many_sizes(values), _rows_of_arrays(values))
        return next((number for number in known if number is not None), None), None
    if any(hasattr(type(value), name) for value in values for name in _OF_GRAPHS):
        return None, None
    first = tensors[0]
    if _is_mapped(first):
        return None, None
    if is_without_shape(first):
        return first.size(0), None
    tensors = [tensor for tensor in tensors if not is_without_shape(tensor)]
    if any(_links_rows(first, other) for other in tensors[1:]):
        return None, None
    num_samples = first.shape[1] if is_length_first and first.dim() > 1 else first.shape[0]
    firsts = [side[0] for side in sides]
    are_tokens = all(map(_are_tokens, firsts)) and any(each.size(1) > 1 for each in firsts)
    return num_samples, sum(each.numel() for each in firsts) if are_tokens else None


def is_result(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the first tensor that a model is called with is what another has returned, as autograd sees it."""
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None)
    return first is not None and first.grad_fn is not None


def is_without_graph(output: Any) -> bool:
    """Whether a module has returned tensors alone, none of which a backward can go through: it keeps nothing for one, as where
    a decorator switches gradients off behind torch's hooks."""
    values = output if isinstance(output, (tuple, list)) else (output,)
    return all(isinstance(value, torch.Tensor) and not value.requires_grad for value in values)


def num_elements_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Elements of all tensors that a model is called with, those in lists and dicts too: how large the call is.

    Containers are looked into two deep, and no further than to their hundredth value: each call is counted so.
    """
    return _num_elements((*args, *kwargs.values()), depth=2)


def _num_elements(values: Iterable[Any], depth: int) -> int:
    num_elements = 0
    for value in islice(values, _MOST_VALUES):
        if isinstance(value, torch.Tensor):
            num_elements += value.numel()
        elif depth and isinstance(value, (list, tuple)):
            num_elements += _num_elements(value, depth - 1)
        elif depth and isinstance(value, Mapping):
            num_elements += _num_elements(value.values(), depth - 1)
    return num_elements


def _of_numbered_batch(values: Sequence[Any]) -> list[torch.Tensor]:
    """What is in a list that is the first of two arguments, the second a whole number, if all have as many rows: Lightning's
    `training_step(batch, batch_idx)`. None of images in a list, whose rows would be colours."""
    whole = values[0] if len(values) == 2 and type(values[1]) is int else ()
    if not isinstance(whole, (list, tuple)) or not 1 < len(whole) <= _MOST_VALUES:
        return []
    tensors = _shaped(whole)
    is_images = all(tensor.dim() == 3 for tensor in tensors)
    return [] if is_images or len({tensor.size(0) for tensor in tensors}) > 1 else tensors


def _alike_in_dictionaries(values: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Of a model that takes a dictionary and no tensor beside it, what is in it; of one that takes a list of dictionaries,
    what is in each, if they begin with tokens: those of a detector have the boxes of one image each.

    None where they differ in their rows, as images and the boxes of all of them do: nobody knows which are the samples.
    """
    for value in values:
        whole = [value] if isinstance(value, Mapping) else value
        if not (isinstance(whole, (list, tuple)) and whole and all(isinstance(v, Mapping) for v in whole)):
            continue
        sides = [_shaped(tuple(islice(each.values(), _MOST_VALUES))) for each in whole[:_MOST_VALUES]]
        rows = {tensor.size(0) for side in sides for tensor in side}
        is_one = whole is not value
        is_known = all(sides) and (is_one or all(_are_tokens(side[0]) for side in sides))
        return sides if is_known and len(rows) == 1 else []
    return []


def _images_with_targets(values: Sequence[Any]) -> int | None:
    """How many images a detector of torchvision's is given: a list of images, and one of as many dictionaries."""
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    images = [len(each) for each in lists if all(isinstance(one, torch.Tensor) for one in each)]
    targets = [len(each) for each in lists if all(isinstance(one, Mapping) for one in each)]
    return images[0] if len(images) == 1 and images == targets else None


def _images_of_many_sizes(values: Sequence[Any]) -> int | None:
    """How many images a model that packs them is given (NaViT): a list of them, or a list of lists. That they are images, and
    no sequences of one batch, their sizes tell, which differ in both directions."""
    lists = [value for value in values if isinstance(value, (list, tuple)) and value]
    if len(lists) != 1:
        return None
    (whole,) = lists
    is_nested = all(isinstance(each, (list, tuple)) for each in whole)
    images = [image for each in whole for image in each] if is_nested else whole
    if not all(isinstance(image, torch.Tensor) and image.dim() == 3 for image in images):
        return None
    channels, *sides = ({image.shape[place] for image in images} for place in range(3))
    return len(images) if len(channels) == 1 and all(len(side) > 1 for side in sides) else None


def _rows_of_arrays(values: Sequence[Any]) -> int | None:
    """Of a model that takes numpy's arrays, as those of reinforcement learning do what an environment has said."""
    arrays = (value for value in values if type(value).__module__ == "numpy" and hasattr(value, "ndim"))
    first = next((array for array in arrays if array.ndim > 1), None)
    return None if first is None else int(first.shape[0])


def _are_tokens(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


def _shaped(values: Sequence[Any]) -> list[torch.Tensor]:
    """Those that may be a batch."""
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    return [
        value
        for value in tensors
        if is_without_shape(value) or value.dim() > 1 or not value.is_floating_point() or _is_mapped(value)
    ]


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
