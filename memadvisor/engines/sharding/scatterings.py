"""Reductions of gradients to shards: how many units' are under way, and what each leaves.

One that overlaps keeps a unit's full gradient, and a shard of staging, until it is waited for: by a later reduction, where
the schedule's `reduce_depth` units' are under way, or by the end of the backward. The lane does them in their order, so the
oldest is waited for first.
"""

from __future__ import annotations

import torch

from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.lanes.lanes import Chain
from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.schedule import Action


class Scatterings:
    """Part of an executor."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._wire: Wire = sharded.wire
        self._under_way: dict[str, list[Flat]] = {}  # by unit, the oldest first

    def abandon(self) -> None:
        """Let go of those of a backward that an exception ended."""
        for flats in self._under_way.values():
            for flat in flats:
                flat.scattering = None
                flat.drop_full_gradient()
        self._under_way.clear()

    def begin(self, flat: Flat, action: Action) -> None:
        """Sum a flat's gradients, which are used up, to shards; over with what it leaves where the action says so."""
        grad = flat.full_gradient()
        if grad is None:
            return
        self._sharded.remember("reduce_scatter", flat)
        if action.overlaps:
            flat.scattering = self._sharded.transfers.begin_reduce_scatter(flat, grad)
            self._under_way.setdefault(flat.unit, []).append(flat)
            return
        own = self._sharded.transfers.reduce_scatter(flat, grad)
        if self._wire.across is None:
            self._keep_shard(flat, own)
        else:
            flat.scattering = Chain([], own)
            self._under_way.setdefault(flat.unit, []).append(flat)

    def sum_across(self, action: Action) -> None:
        """Sum over the groups what the reduction inside, just before, leaves of the same unit."""
        for flat in self._under_way.get(action.unit, ()):
            if not isinstance(flat.scattering, Chain):
                continue
            if action.overlaps:
                flat.scattering = self._wire.begin_sum_across(flat.scattering, flat.unit)
            else:
                self._wire.sum_across(flat.scattering.result, flat.unit)
        if not action.overlaps:
            self.end()

    def make_room(self) -> None:
        """Another unit's is about to begin."""
        while len(self._under_way) >= self._sharded.schedule.reduce_depth:
            self._end_oldest()

    def end(self) -> None:
        """Wait for all."""
        while self._under_way:
            self._end_oldest()

    def _end_oldest(self) -> None:
        unit, flats = next(iter(self._under_way.items()))
        with torch.no_grad():
            for flat in flats:
                if flat.scattering is not None:
                    own, flat.scattering = flat.scattering.wait(), None
                    self._keep_shard(flat, own)
        del self._under_way[unit]  # one that fails is still to be abandoned

    def _keep_shard(self, flat: Flat, own: torch.Tensor) -> None:
        """Take the sum over, in the optimizer's dtype, in which micro-batches are added up."""
        # A slice of the full buffer would keep all of it alive.
        shares = flat.grad is not None and own.untyped_storage()._cdata == flat.grad.untyped_storage()._cdata
        flat.drop_full_gradient()
        if flat.page is not None:
            return  # it lies elsewhere
        if flat.grad_shard is None:
            flat.grad_shard = own.clone() if shares and own.dtype == flat.dtype else own.to(flat.dtype)
            self._sharded.label(flat.grad_shard, "gradient", flat.unit)
        else:
            flat.grad_shard.add_(own)
