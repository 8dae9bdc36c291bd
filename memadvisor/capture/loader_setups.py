"""How the DataLoaders are set up that the training reads, and which of them an iterator is of.

Nothing is kept alive, and no attribute of the script's is written: an iterator is known by its address while it lives.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsIndex

from memadvisor.run.loader_records import LoaderInfo

_MOST_LOADERS = 32  # from which on those that are set up alike are one


@dataclass(slots=True)
class _Met:
    iterator: weakref.ref[Any]
    data_set: int  # where it lies
    info: LoaderInfo
    number: int | None = None  # None: it has not been read


class LoaderSetups:
    def __init__(self) -> None:
        self._new: list[LoaderInfo] = []
        self._met: dict[int, _Met] = {}
        self._last: _Met | None = None
        self._numbers: dict[tuple[int, LoaderInfo], int] = {}

    def meet(self, iterator: Any, loader: Any) -> None:
        workers = index(loader.num_workers)
        info = LoaderInfo(
            loader=-1,
            num_workers=workers,
            prefetch_factor=loader.prefetch_factor if workers else None,
            pin_memory=bool(loader.pin_memory),
            persistent_workers=bool(loader.persistent_workers),
            batch_size=_batch_size_of(loader) or _batch_size_of(loader.batch_sampler),
        )
        self._remember(iterator, info)

    def number_of(self, iterator: Any) -> int:
        met = self._last
        if met is None or met.iterator() is not iterator:
            met = self._met.get(id(iterator))
            if met is None or met.iterator() is not iterator:
                met = self._remember(iterator, _info_of(iterator))
            self._last = met
        if met.number is None:
            met.number = self._new_number(met)
        return met.number

    def take_new(self) -> list[LoaderInfo]:
        """Those that have been numbered since the last call."""
        new, self._new = self._new, []
        return new

    def _remember(self, iterator: Any, info: LoaderInfo) -> _Met:
        self._met = {key: met for key, met in self._met.items() if met.iterator() is not None}
        self._last = met = self._met[id(iterator)] = _Met(weakref.ref(iterator), id(iterator._dataset), info)
        return met

    def _new_number(self, met: _Met) -> int:
        is_full = len(self._numbers) >= _MOST_LOADERS
        key = (0 if is_full else met.data_set, met.info)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._new.append(replace(met.info, loader=self._numbers[key]))
        return self._numbers[key]


def _info_of(iterator: Any) -> LoaderInfo:
    """What an iterator says itself, where its loader was not seen to make it."""
    workers = index(iterator._num_workers)
    return LoaderInfo(
        loader=-1,
        num_workers=workers,
        prefetch_factor=getattr(iterator, "_prefetch_factor", None) if workers else None,
        pin_memory=bool(iterator._pin_memory),
        persistent_workers=bool(iterator._persistent_workers),
        batch_size=_batch_size_of(iterator._index_sampler),
    )


def _batch_size_of(holder: Any) -> int | None:
    """As it stands in a loader or a sampler of batches; nothing of the script's is called for it."""
    size = getattr(holder, "__dict__", {}).get("batch_size")
    return index(size) if isinstance(size, SupportsIndex) else None
