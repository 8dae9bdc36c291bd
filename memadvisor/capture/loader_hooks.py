"""Where torch's DataLoaders make their iterators and give out their batches: two functions that a recorder wraps.

`_BaseDataLoaderIter.__next__` is what iterators of one and of several processes end in, and so the loaders of accelerate,
Lightning and torchdata. Recorders' wrappers stand around one another. One whose recorder has gone passes all calls on, and
goes itself as soon as it is the outermost one: where somebody else has put a wrapper around it, it stays inside that. A
forked child, such as a loader's worker, begins without any of them; one that is spawned imports torch anew.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from memadvisor.never_compiled import never_compiled_itself

# What was waited for: the iterator, its first batch, another one, and word that there are no more, or why there are none.
START, FIRST, BATCH, END = range(4)


class Waiter(Protocol):
    """Who is told. Raises nothing. `begin` gives None where a wait is nobody's concern."""

    def begin(self) -> Any: ...
    def end(self, begun: Any, iterator: Any, what: int) -> None: ...
    def meet(self, iterator: Any, loader: Any) -> None: ...


_Function = Callable[[Any], Any]


class _Wrappers:
    def __init__(self) -> None:
        self._of: dict[Waiter, list[tuple[Any, str, _Function]]] = {}
        self._originals: dict[_Function, _Function] = {}  # of each wrapper
        self._gone: set[_Function] = set()  # whose recorder has
        self._follows_forks = False

    def tell(self, waiter: Waiter) -> Callable[[], None]:
        """`waiter` is told from now on, until what this returns is called."""
        if not self._follows_forks:
            self._follows_forks = True
            os.register_at_fork(after_in_child=self._forget_all)
        self._of[waiter] = [
            self._put(_BaseDataLoaderIter, "__next__", partial(_next, waiter)),
            self._put(DataLoader, "__iter__", partial(_iter, waiter)),
        ]
        return partial(self._forget, waiter)

    def _put(
        self, owner: Any, name: str, wrap: Callable[[_Function], _Function]
    ) -> tuple[Any, str, _Function]:
        original = getattr(owner, name)
        wrapper = never_compiled_itself(wrap(original))
        self._originals[wrapper] = original
        setattr(owner, name, wrapper)
        return owner, name, wrapper

    def _forget(self, waiter: Waiter) -> None:
        for owner, name, wrapper in self._of.pop(waiter, ()):
            self._gone.add(wrapper)
            while (outermost := getattr(owner, name)) in self._gone:
                self._gone.discard(outermost)
                setattr(owner, name, self._originals.pop(outermost))

    def _forget_all(self) -> None:
        for waiter in list(self._of):
            self._forget(waiter)


def _next(waiter: Waiter, original: _Function) -> _Function:
    begin, end = waiter.begin, waiter.end

    def __next__(self: Any) -> Any:
        begun = begin()
        if begun is None:
            return original(self)
        what = END
        try:
            batch = original(self)
            what = BATCH
            return batch
        finally:
            end(begun, self, what)

    return __next__


def _iter(waiter: Waiter, original: _Function) -> _Function:
    def __iter__(self: Any) -> Any:
        begun: Any = waiter.begin()
        iterator = None
        try:
            iterator = original(self)
            return iterator
        finally:
            if iterator is not None:
                waiter.meet(iterator, self)
            if begun is not None:
                waiter.end(begun, iterator, START)

    return __iter__


tell_of_loaders = _Wrappers().tell
