"""torch.distributed.checkpoint on tensors that lie on several ranks: each rank writes and reads what it holds.

Its planner asks each tensor which rectangular parts of it this rank has (boxes.py). That is the shards' own, where
all ranks that share them take part in the checkpoint, and hold all of its tensors in shards alike; else each such
tensor is written as a whole by one of the ranks, and read as a whole by all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.boxes import Box
from memadvisor.engines.sharding.late import LateTensor


class Loading(Protocol):
    """What a checkpoint is read into, and who is to be told when all ranks have it.

    is_read_into: until then. place: tells those apart of which one is to be told, and orders them, alike on all ranks.
    """

    is_read_into: bool

    @property
    def place(self) -> tuple[int, int]: ...

    def show_loaded(self) -> None: ...


_taking_part: frozenset[int] = frozenset()  # the ranks of the checkpoint under way
_loading: list[Loading] = []


def patch(undo: Undo) -> None:
    """Learn of each checkpoint which ranks take part in it."""
    for module, name in ((state_dict_saver, "_save_state_dict"), (state_dict_loader, "_load_state_dict")):
        original = getattr(module, name, None)  # without it every tensor is written whole, which is right too
        if original is not None and original.__module__ != __name__:
            undo.replace(module, name, _noting_ranks(original))


def _noting_ranks(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def noting(*args: Any, **kwargs: Any) -> Any:
        global _taking_part
        given = signature.bind(*args, **kwargs).arguments
        _taking_part = _ranks_of(given)
        try:
            result = original(*args, **kwargs)
            _show_loaded()
            return result
        finally:
            _taking_part = frozenset()
            while _loading:
                _loading.pop().is_read_into = False

    return noting


def begin_loading(source: Loading) -> None:
    """The checkpoint under way reads into a source."""
    source.is_read_into = True
    _loading.append(source)


def _show_loaded() -> None:
    loaded = {source.place: source for source in _loading}
    for _, source in sorted(loaded.items()):
        source.show_loaded()


def _ranks_of(given: dict[str, Any]) -> frozenset[int]:
    """The ranks that take part, where all of them have the same tensors in shards."""
    if given.get("no_dist") or not given.get("use_collectives", True) or not dist.is_initialized():
        return frozenset()
    group = given.get("process_group") or dist.group.WORLD
    late: list[str] = []

    def visit(path: tuple[Any, ...], value: Any) -> None:
        if type(value) is LateTensor and value.source.kept is None:
            late.append(str(path))

    traverse_state_dict(given["state_dict"], visit)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, late, group=group)
    if any(names != late for names in found):
        return frozenset()
    return frozenset(dist.get_process_group_ranks(group))


def is_of_all(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group take part in the checkpoint under way."""
    return _taking_part.issuperset(dist.get_process_group_ranks(group))


def items_of_shard(
    fqn: str, dtype: torch.dtype, shape: torch.Size, chunks: Sequence[ChunkStorageMetadata]
) -> list[WriteItem]:
    """What this rank writes of a tensor that is in shards."""
    return [_write_item(WriteItemType.SHARD, fqn, dtype, shape, chunk) for chunk in chunks]


def items_of_whole(fqn: str, dtype: torch.dtype, shape: torch.Size) -> list[WriteItem]:
    """What is written of one that is written whole; torch shares out who does."""
    return [_write_item(WriteItemType.TENSOR, fqn, dtype, shape, whole_chunk(shape))]


def _write_item(
    kind: WriteItemType, fqn: str, dtype: torch.dtype, shape: torch.Size, chunk: ChunkStorageMetadata
) -> WriteItem:
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=dtype), size=shape)
    return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=kind, tensor_data=data)


def whole_chunk(shape: torch.Size) -> ChunkStorageMetadata:
    """All of a tensor as one part of it."""
    return ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)


def chunk_of_layout(layout: Any) -> ChunkStorageMetadata:
    """What this rank has of a DTensor, by its DTensorSpec."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(layout.shape, layout.mesh, layout.placements)
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def chunks_of(order: Sequence[int], boxes: Sequence[Box]) -> list[ChunkStorageMetadata]:
    """Boxes whose dimensions are in storage order, as parts of a tensor."""
    places = [order.index(dim) for dim in range(len(order))]
    return [
        ChunkStorageMetadata(
            offsets=torch.Size([box.offsets[place] for place in places]),
            sizes=torch.Size([box.sizes[place] for place in places]),
        )
        for box in boxes
    ]
