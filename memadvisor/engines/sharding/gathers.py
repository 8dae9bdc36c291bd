"""Bringing parameters of stage 3 in: at once, ahead while others run, or from ranks that are asked.

What the next forward begins with may come in behind its update, while the optimizer step updates others. Until all ranks
meet before that forward it is a guess: a script may write into parameters in between, load others, or evaluate on one rank
alone. Each rank knows by the version of its shard whether it is still as it was sent, and has let go of what it read for
other ends; in the meeting they tell each other, and all of them use what has come, or none does. Scripts that spoil it step
after step are left alone.
"""

from __future__ import annotations

import torch

from memadvisor.engines.sharding.arrivals import drop, settle
from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.loans import Loans
from memadvisor.engines.sharding.released import show
from memadvisor.engines.sharding.service import AnyService
from memadvisor.engines.sharding.sharded_model import ShardedModel

_MOST_SPOILT = 3
_SPOILT = "the script reads or writes parameters between steps, so nothing more is gathered behind its update for the next forward"


class Gathers:
    """Part of an executor. What they have brought goes by `release` (released.py)."""

    def __init__(self, sharded: ShardedModel, service: AnyService, early: EarlyUpdates, loans: Loans) -> None:
        self.sharded = sharded
        self._service = service
        self._early = early
        self._loans = loans
        # Versions of shards as they were sent behind their updates, by index of flat.
        self._behind: dict[int, int] = {}
        self._is_spoilt = False  # this rank has let go of some of those
        self._num_spoilt = 0  # meetings in a row that found some spoilt, the same on all ranks

    def gather(self, flat: Flat, collective: bool | None = None) -> None:
        """Make a flat present; nothing happens when it is. collective: None for as the pass under way is."""
        if flat.present or flat.full is None or not flat.has_shard:
            return
        if flat.stage < 3:
            settle(flat)
            return
        self._early.read(flat)
        if flat.index in self._behind:  # whoever asks before all have met needs what is true now
            self._let_go(flat)
        with torch.no_grad():
            if flat.arriving is not None:
                flat.arriving.wait()
                flat.arriving = flat.second = None
                self._loans.keep_sent(flat)
            else:
                self._make_room(flat, flat.full)
                if self.sharded.collective if collective is None else collective:
                    self.sharded.remember("gather", flat)
                    self.sharded.transfers.gather(flat)
                    self._loans.keep_sent(flat)
                else:
                    self._loans.fill(flat, flat.full, collective=False)
            for slot in flat.slots:
                show(slot, flat.full)

    def begin(self, flat: Flat) -> None:
        """Have a stage-3 flat come in while others run; its parameters stay hidden until `gather`."""
        if flat.present or flat.arriving is not None or flat.full is None or not flat.has_shard:
            return
        with torch.no_grad():
            self._make_room(flat, flat.full)
            if self.sharded.asks:
                flat.arriving = self._service.begin_fetch(flat, flat.full)
                return
            self.sharded.remember("gather", flat)
            flat.arriving = self.sharded.transfers.begin_gather(flat)

    def begin_behind_update(self, flat: Flat) -> None:
        """All of a flat has been updated, and the next forward begins with it. All ranks are here in the same order."""
        if self.sharded.any_order or self._num_spoilt >= _MOST_SPOILT or flat.shard is None:
            return
        drop(flat)  # of an earlier step that no forward followed
        self.begin(flat)
        if flat.arriving is not None:
            self._behind[flat.index] = flat.shard._version

    def wait_for_sent(self) -> None:
        """An optimizer step begins: its shards are free to be written into."""
        for flat in self.sharded.flats:
            if flat.index in self._behind and flat.arriving is not None:
                flat.arriving.wait()

    def meet(self) -> None:
        """All ranks meet before a training pass, and use what has come in behind updates, or let go of it."""
        spoilt = self._is_spoilt or any(
            flat.loan is not None
            or self._loans.followers.of(flat)
            or flat.shard is None
            or flat.shard._version != self._behind[flat.index]
            for flat in self.sharded.flats
            if flat.index in self._behind
        )
        is_spoilt = self.sharded.meet(spoilt)
        if is_spoilt:
            for flat in self.sharded.flats:
                if flat.index in self._behind:
                    drop(flat)
        if is_spoilt or self._behind:
            self._num_spoilt = self._num_spoilt + 1 if is_spoilt else 0
        if is_spoilt and self._num_spoilt == _MOST_SPOILT:
            self.sharded.note("warning", _SPOILT)
        self._behind.clear()
        self._is_spoilt = False

    def _let_go(self, flat: Flat) -> None:
        drop(flat)
        del self._behind[flat.index]
        self._is_spoilt = True

    def _make_room(self, flat: Flat, full: torch.Tensor) -> None:
        full.untyped_storage().resize_(flat.padded_numel * full.itemsize)
        self.sharded.label(full, "parameter", flat.unit)

    def drop_begun(self) -> None:
        """Let go of what was gathered ahead in a pass and never asked for, as when the model takes another way."""
        for flat in self.sharded.flats:
            if flat.index not in self._behind:
                drop(flat)
