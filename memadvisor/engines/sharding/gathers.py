"""Bringing parameters of stage 3 in: at once, ahead while others run, or from ranks that are asked."""

from __future__ import annotations

import torch

from memadvisor.engines.sharding.arrivals import drop, settle
from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.loans import Loans
from memadvisor.engines.sharding.released import show
from memadvisor.engines.sharding.service import AnyService
from memadvisor.engines.sharding.sharded_model import ShardedModel


class Gathers:
    """Part of an executor. What they have brought goes by `release` (released.py)."""

    def __init__(self, sharded: ShardedModel, service: AnyService, early: EarlyUpdates, loans: Loans) -> None:
        self.sharded = sharded
        self._service = service
        self._early = early
        self._loans = loans

    def gather(self, flat: Flat, collective: bool | None = None) -> None:
        """Make a flat present; nothing happens when it is. collective: None for as the pass under way is."""
        if flat.present or flat.full is None or not flat.has_shard:
            return
        if flat.stage < 3:
            settle(flat)
            return
        self._early.read(flat)
        with torch.no_grad():
            if flat.arriving is not None:
                flat.arriving.wait()
                flat.arriving = flat.second = None
            else:
                self._make_room(flat, flat.full)
                if self.sharded.collective if collective is None else collective:
                    self.sharded.remember("gather", flat)
                    self.sharded.transfers.gather(flat)
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

    def _make_room(self, flat: Flat, full: torch.Tensor) -> None:
        full.untyped_storage().resize_(flat.padded_numel * full.itemsize)
        self.sharded.label(full, "parameter", flat.unit)

    def drop_begun(self) -> None:
        """Let go of what was gathered ahead and never asked for, as when the model takes another way."""
        for flat in self.sharded.flats:
            drop(flat)
