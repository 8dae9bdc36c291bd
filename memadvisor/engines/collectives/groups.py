"""The two axes of hybrid sharding: groups of ranks that share what is sharded, and groups across these.

Ranks that follow each other are a group inside, as those of one machine do under torch's launchers; the ranks that
hold the same shard, one of each group inside, are a group across. And a group whose messages come from the host.
"""

from __future__ import annotations

import datetime
import weakref

import torch.distributed as dist

from memadvisor.backends import sends_from_host

# Groups that nobody uses any more, by their ranks and backend (None: that of the default group). Torch names a group by
# its ranks: one that is made where another of that name has been destroyed finds the addresses of the dead one. So ours
# are used again.
_Kind = tuple[tuple[int, ...], str | None]
_idle: dict[_Kind, list[weakref.ref[dist.ProcessGroup]]] = {}
_kinds: weakref.WeakKeyDictionary[dist.ProcessGroup, _Kind] = weakref.WeakKeyDictionary()


def near(group: dist.ProcessGroup, num_ranks: int) -> dist.ProcessGroup:
    """The group of this rank and its neighbours, so many ranks that follow each other. All of these call it."""
    ranks = [dist.get_global_rank(group, rank) for rank in range(group.size())]
    first = group.rank() // num_ranks * num_ranks
    return _take(group, tuple(ranks[first : first + num_ranks]))


def split(group: dist.ProcessGroup, shard_ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group inside and its group across. All ranks of `group` call this, and nobody else has to."""
    ranks = [dist.get_global_rank(group, rank) for rank in range(group.size())]
    across = ranks[group.rank() % shard_ranks :: shard_ranks]
    return near(group, shard_ranks), _take(group, tuple(across))


def of_host(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """`group`, or where it cannot send what lies in the host's memory (NCCL), one of the same ranks that can.

    All ranks call this. Numbers of the host's that went by way of a GPU would be waited for until it has done all else.
    """
    if sends_from_host(group):
        return group
    return _take(group, tuple(dist.get_process_group_ranks(group)), "gloo")


def give_back(*groups: dist.ProcessGroup | None) -> None:
    """Groups of ours that have had their time; all their ranks do this at the same point of the program."""
    for group in groups:
        if group is not None and group in _kinds and _is_alive(group):
            _idle.setdefault(_kinds[group], []).append(weakref.ref(group))


def _take(whole: dist.ProcessGroup, ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
    idle = _idle.get((ranks, backend), [])
    while idle:
        group = idle.pop(0)()
        if group is not None and _is_alive(group):
            return group
    # A group of its own would wait for half an hour, whatever the script has asked for.
    made = dist.new_group(
        list(ranks), timeout=_timeout_of(whole), backend=backend, use_local_synchronization=True
    )
    if not isinstance(made, dist.ProcessGroup):
        raise AssertionError("this process is no part of its own group")
    _kinds[made] = ranks, backend
    return made


def _is_alive(group: dist.ProcessGroup) -> bool:
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta:
    timeout: datetime.timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout
