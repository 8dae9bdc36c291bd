"""Who, beside autograd, holds what autograd keeps of the traced step, as seen where modules and backwards begin and end, and
where operators write much.

A script may collect what its layers return in a list, or simply have it in a variable: recomputing the layer then frees
nothing before the script lets go. Each saved tensor has a TensorImpl of its own here (saved_hooks.py), so a storage that
more of them share than autograd has saved, and more than the Python object that is asked, is held by somebody else too.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import torch

from memadvisor.capture.label_log import HeldStorage, LabelLog

_OWN_OWNERS = 1  # the Python object that is asked
# Storages that are asked at one boundary on average: a list of thousands is not gone through at each of thousands.
_ASKED_AT_ONCE = 256


class SavedStorage:
    """A storage as long as autograd keeps anything in it; it is held by those that stand for what autograd keeps."""

    __slots__ = ("_holders", "address", "held", "num_saves", "storage")

    def __init__(self, holders: Holders, storage: torch.UntypedStorage, address: int) -> None:
        self._holders = holders
        self.storage = storage
        self.address = address
        self.num_saves = 0
        self.held: HeldStorage | None = None  # its row, once somebody was seen to hold it

    @property
    def is_held(self) -> bool:
        return torch._C._storage_Use_Count(self.storage._cdata) > self.num_saves + _OWN_OWNERS

    def let_go(self) -> None:
        """Autograd keeps it once less."""
        self.num_saves -= 1
        if not self.num_saves:
            self._holders.forget(self)


class Holders:
    """Saved storages that somebody may hold, and the last moment that somebody did."""

    def __init__(self, log: LabelLog) -> None:
        self._log = log
        self._saved: dict[int, SavedStorage] = {}
        self._watched: set[SavedStorage] = set()
        self._num_to_skip = 0

    def save(self, storage: torch.UntypedStorage, address: int, *, is_wrapped: bool = False) -> SavedStorage:
        """Autograd keeps a tensor in `storage` by a TensorImpl that nobody else has. is_wrapped: inside of another tensor
        (a DTensor), which is no reason to look who holds it."""
        key = storage._cdata
        known = self._saved.get(key)
        if known is None:
            known = self._saved[key] = SavedStorage(self, storage, address)
        known.num_saves += 1
        if not is_wrapped:
            self._watched.add(known)
        return known

    def forget(self, saved: SavedStorage) -> None:
        self._saved.pop(saved.storage._cdata, None)
        self._watched.discard(saved)

    def look(self, apart: Collection[int] = (), *, must: bool = False) -> None:
        """What nobody holds but autograd, nobody will hold again, unless it is saved once more. Nothing is noted of
        storages at the addresses `apart`. Without `must`, where much is held, some boundaries go by."""
        if self._num_to_skip and not must:
            self._num_to_skip -= 1
            return
        self._num_to_skip = len(self._watched) // _ASKED_AT_ONCE
        now_ns = time.time_ns()
        for saved in list(self._watched):
            if not saved.is_held:
                self._watched.discard(saved)
            elif saved.address in apart:
                continue
            elif saved.held is None:
                saved.held = HeldStorage(saved.address, now_ns)
                self._log.held.append(saved.held)
            else:
                saved.held.time_ns = now_ns
