"""The moment of a step at which most memory was allocated, and whose it was: what is kept of a step of too many
operators to remember, whose account is closed each time that no more may be remembered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memadvisor.capture.account import Account
from memadvisor.run.records import Storage


@dataclass(frozen=True, slots=True)
class FullestMoment:
    """`allocated_bytes` is the allocator's own peak; None where it kept none. `storages` were alive at the moment."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    storages: list[Storage]

    @property
    def total_bytes(self) -> int:
        if self.allocated_bytes is None:
            return sum(storage.size_bytes for storage in self.storages)
        return self.allocated_bytes


def fullest_moment(account: Account) -> FullestMoment:
    """Of the stretch that one account is about: the moment at which its storages summed to most."""
    peak_s = _peak_s(account.storages)
    alive = [
        storage
        for storage in account.storages
        if storage.birth_s <= peak_s and (storage.death_s is None or storage.death_s > peak_s)
    ]
    return FullestMoment(account.peak_allocated_bytes, account.peak_reserved_bytes, alive)


def fuller(one: FullestMoment | None, other: FullestMoment) -> FullestMoment:
    """The one with more allocated; reserved bytes are the most of both."""
    if one is None:
        return other
    reserved = [moment.reserved_bytes for moment in (one, other) if moment.reserved_bytes is not None]
    best = other if other.total_bytes > one.total_bytes else one
    return FullestMoment(best.allocated_bytes, max(reserved, default=None), best.storages)


def _peak_s(storages: Iterable[Storage]) -> float:
    changes = [(storage.birth_s, storage.size_bytes) for storage in storages]
    changes += [(storage.death_s, -storage.size_bytes) for storage in storages if storage.death_s is not None]
    level = highest = 0
    peak_s = 0.0
    for time_s, delta in sorted(changes):  # at one moment what is freed goes first
        level += delta
        if level > highest:
            highest, peak_s = level, time_s
    return peak_s
