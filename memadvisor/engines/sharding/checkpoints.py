"""torch.distributed.checkpoint on tensors that lie on several ranks: each rank writes and reads what it holds.

Its planner asks each tensor which rectangular parts of it this rank has (boxes.py). That is the shards' own, where
all ranks that share them take part in the checkpoint, and hold all of its tensors in shards alike; else each such
tensor is written as a whole by one of the ranks, and read as a whole by all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding.late import LateTensor
from memadvisor.engines.sharding.masters import show_masters, take_written
from memadvisor.engines.sharding.parcels import StateSource
from memadvisor.engines.sharding.sharded_step import MASTER
from memadvisor.engines.sharding.sources import Source

_taking_part: frozenset[int] = frozenset()  # the ranks of the checkpoint under way
_loading: list[Source] = []  # masters that it is read into


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


def _show_loaded() -> None:
    """Masters that all ranks have read into their shards: parameters beside them follow."""
    loaded = {(s.executor.number, s.slot.flat.index): s for s in _loading}
    for _, source in sorted(loaded.items()):
        show_masters(source.executor, source.slot.flat)


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


def write_items(fqn: str, source: Source | StateSource) -> list[WriteItem]:
    """What this rank writes of a tensor; of one that is written whole, torch shares out who does."""
    source.is_written = True
    if isinstance(source, Source) and _is_shared_out(source):
        return [_write_item(WriteItemType.SHARD, fqn, source, chunk) for chunk in _own_chunks(source)]
    return [_write_item(WriteItemType.TENSOR, fqn, source, _whole_chunk(source))]


def chunks_to_read(source: Source | StateSource) -> list[ChunkStorageMetadata]:
    """What this rank reads of a tensor: its own part, which goes into the model itself, or all."""
    source.is_written = False
    if isinstance(source, StateSource):
        return [_whole_chunk(source)]
    if not _is_shared_out(source) or (source.slot.flat.has_masters and not source.key):
        source.is_shared_out = False  # shards hold more digits, which the optimizer's state brings
        return [_whole_chunk(source)]
    if not source.key:
        source.executor.loans.end_one(source.slot.flat)  # it has the other ranks' old values
    elif source.key == MASTER:
        take_written([source.slot.flat])  # not later, as what has been read by then would be taken for old
        source.is_read_into = True
        _loading.append(source)
    return _own_chunks(source)


def _is_shared_out(source: Source) -> bool:
    if source.executor.is_alone:
        source.is_shared_out = False
        return False
    group = source.executor.wire.everyone
    source.is_shared_out = source.kept is None and _taking_part.issuperset(
        dist.get_process_group_ranks(group)
    )
    return source.is_shared_out


def _write_item(
    kind: WriteItemType, fqn: str, source: Source | StateSource, chunk: ChunkStorageMetadata
) -> WriteItem:
    properties = TensorProperties(dtype=source.dtype)
    data = TensorWriteData(chunk=chunk, properties=properties, size=source.shape)
    return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=kind, tensor_data=data)


def _whole_chunk(source: Source | StateSource) -> ChunkStorageMetadata:
    shape = source.shape
    return ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)


def _own_chunks(source: Source) -> list[ChunkStorageMetadata]:
    order, boxes = source.boxes()
    places = [order.index(dim) for dim in range(len(order))]
    return [
        ChunkStorageMetadata(
            offsets=torch.Size([box.offsets[place] for place in places]),
            sizes=torch.Size([box.sizes[place] for place in places]),
        )
        for box in boxes
    ]
