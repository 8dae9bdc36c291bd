"""How the DataLoaders are set up that the training reads, and which of them an iterator is of.

Nothing is kept alive, and no attribute of the script's is written: an iterator is known by its address while it lives.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from memadvisor.run.loader_records import LoaderInfo

# From which on those that are set up alike are one.
_MOST_LOADERS = 32
# After so many iterators those that are gone are forgotten.
_MOST_ITERATORS = 32

# Workers, prefetch factor, whether it pins memory, whether its workers last, batch size.
_Setup = tuple[int, int | None, bool, bool, int | None]


@dataclass(slots=True)
class _Met:
    iterator: weakref.ref[Any]
    data_set: int  # where it lies
    setup: _Setup
    number: int | None = None  # None: it has not been read


class LoaderSetups:
    def __init__(self) -> None:
        self._new: list[LoaderInfo] = []
        self._met: dict[int, _Met] = {}
        self._last: _Met | None = None
        self._numbers: dict[tuple[int, _Setup], int] = {}

    def meet(self, iterator: Any, loader: Any) -> None:
        batch_size = loader.batch_size
        self._remember(
            iterator,
            (
                index(loader.num_workers),
                loader.prefetch_factor,
                bool(loader.pin_memory),
                bool(loader.persistent_workers),
                _batch_size_of(loader.batch_sampler) if batch_size is None else batch_size,
            ),
        )

    def number_of(self, iterator: Any) -> int:
        met = self._last
        if met is None or met.iterator() is not iterator:
            met = self._met.get(id(iterator))
            if met is None or met.iterator() is not iterator:
                met = self._remember(iterator, _setup_of(iterator))
            self._last = met
        if met.number is None:
            met.number = self._new_number(met)
        return met.number

    def take_new(self) -> Sequence[LoaderInfo]:
        """Those that have been numbered since the last call."""
        if not self._new:
            return ()
        new, self._new = self._new, []
        return new

    def _remember(self, iterator: Any, setup: _Setup) -> _Met:
        if len(self._met) >= _MOST_ITERATORS:
            self._met = {key: met for key, met in self._met.items() if met.iterator() is not None}
        self._last = met = self._met[id(iterator)] = _Met(weakref.ref(iterator), id(iterator._dataset), setup)
        return met

    def _new_number(self, met: _Met) -> int:
        is_full = len(self._numbers) >= _MOST_LOADERS
        key = (0 if is_full else met.data_set, met.setup)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            workers, prefetch_factor, pins, lasts, batch_size = met.setup
            prefetch_factor = prefetch_factor if workers else None
            self._new.append(LoaderInfo(number, workers, prefetch_factor, pins, lasts, batch_size))
        return number


def _setup_of(iterator: Any) -> _Setup:
    """What an iterator says itself, where its loader was not seen to make it."""
    return (
        index(iterator._num_workers),
        getattr(iterator, "_prefetch_factor", None),
        bool(iterator._pin_memory),
        bool(iterator._persistent_workers),
        _batch_size_of(iterator._index_sampler),
    )


def _batch_size_of(sampler: Any) -> int | None:
    """As it stands in a sampler of batches; nothing of the script's is called for it."""
    size = getattr(sampler, "__dict__", {}).get("batch_size")
    return size if type(size) is int else None
