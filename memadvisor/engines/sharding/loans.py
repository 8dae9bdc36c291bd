"""Full copies of released parameters, lent to the script: what it reads and writes outside training passes.

A loan is one unit's flat. It ends when all ranks meet next (a training forward, an optimizer step), with what
was written into it kept, and what the script still holds of it follows the parameter from then on (followers.py); or when
another unit is lent, if the script holds nothing of it any more. So a
script that goes through a model's parameters one by one has one unit of it in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.flat import Flat, Slot
from memadvisor.engines.sharding.followers import Followers
from memadvisor.engines.sharding.holders import is_held
from memadvisor.engines.sharding.service import AnyService
from memadvisor.engines.sharding.sharded_model import ShardedModel


class Loans:
    """Part of an executor."""

    def __init__(self, sharded: ShardedModel, service: AnyService, early: EarlyUpdates) -> None:
        self._sharded = sharded
        self._service = service
        self._early = early
        self.followers = Followers()

    def lend(self, slot: Slot) -> torch.Tensor:
        """Full values of a released parameter, in memory of their own."""
        is_new, lent = slot.flat.loan is None, self._lend(slot)
        if is_new and slot.flat.loan is not None:
            for other in slot.flat.slots:
                self.followers.overlay(other, other.view(slot.flat.loan))
        return lent

    def give(self, slot: Slot, values: torch.Tensor) -> None:
        """`parameter.data = values`: from now on that memory is the parameter's. What the script has had of the unit before
        follows its other parameters, and is the script's own in the place of this one, as the copy that a restored average
        leaves behind."""
        flat = slot.flat
        self.lend(slot)
        self.followers.drop(slot)
        with torch.no_grad():
            if flat.loan is not None and is_held(flat.loan):
                before, flat.loan = flat.loan, flat.loan.clone()
                self._sharded.label(flat.loan, "parameter", flat.unit)
                flat.loan_version, flat.is_loan_fixed = flat.loan._version, False
                for other in flat.slots:
                    if other is not slot and self.followers.memory_of(other) is None:
                        self.followers.add(other, other.view(before))
            if flat.loan is None:
                raise AssertionError("what is lent is a loan")
            slot.view(flat.loan).copy_(values)
        self.followers.add(slot, values)

    def _lend(self, slot: Slot) -> torch.Tensor:
        flat = slot.flat
        self._early.read(flat)
        self._take_back(other for other in self._sharded.flats if other is not flat)
        if flat.loan is None:
            with torch.no_grad():
                loan = flat.new(flat.padded_numel, flat.script_dtype)
                self._sharded.label(loan, "parameter", flat.unit)
                self.fill(flat, loan, self._sharded.collective)
                flat.loan = loan
            flat.loan_version = loan._version
        return slot.view(flat.loan)

    def fill(self, flat: Flat, full: torch.Tensor, collective: bool) -> None:
        """Write a flat's parameters, from all ranks, into `full`, in every digit that `full` has."""
        sharded = self._sharded
        if collective:
            sharded.remember("gather", flat)
            sharded.wire.gather(full, flat.own_part(full), flat.unit, flat.index)
        elif flat.loan is not None:
            full.copy_(flat.loan)
        elif sharded.asks:
            self._service.begin_fetch(flat, full).wait()
        else:
            self._service.fetch_parameters(flat, full)

    def keep_writes(self, slot: Slot) -> None:
        """The script has written into a lent parameter, as every rank does at this point."""
        if slot.flat.loan is not None:
            with torch.no_grad():
                self.followers.overlay(slot, slot.view(slot.flat.loan))
                self.followers.follow(slot, slot.view(slot.flat.loan))
        self._keep(slot.flat)
        self._renew(slot.flat)
        self._sharded.num_writes += 1

    def keep_sent(self, flat: Flat) -> None:
        """Each rank has sent what it has of a flat, and so is past what others may still have read: what was written into the
        loan past us went along, and is kept."""
        if flat.may_have_written_loan:
            self._keep(flat)
            self._renew(flat)

    def _renew(self, flat: Flat) -> None:
        """What has been gathered of a flat, or is on its way, has the values from before the script wrote into the loan."""
        flat.second = None
        if flat.full is None or flat.loan is None or flat.full.untyped_storage().nbytes() == 0:
            return
        if flat.arriving is not None:
            flat.arriving.wait()
        with torch.no_grad():
            flat.full.copy_(flat.loan)

    def end(self) -> None:
        """Take loans back, with what was written past us (`p.data`); only after a meeting of all ranks."""
        for flat in self._sharded.flats:
            self.end_one(flat)
        with torch.no_grad():
            self.followers.take()

    def step_ends(self) -> None:
        """What the script holds of released parameters gets their new values."""
        with torch.no_grad():
            self.followers.fill(self._lend)
        self._take_back(self._sharded.flats)

    def end_one(self, flat: Flat) -> None:
        """Take one loan back, as all ranks do."""
        self._keep(flat)
        if flat.loan is not None and is_held(flat.loan):
            for slot in flat.slots:
                self.followers.add(slot, slot.view(flat.loan))
        flat.loan, flat.is_loan_fixed = None, False

    def _keep(self, flat: Flat) -> None:
        if flat.loan is not None:
            with torch.no_grad():
                flat.keep_loan()
            flat.loan_version = flat.loan._version

    def _take_back(self, flats: Iterable[Flat]) -> None:
        """Let go of loans that nobody holds and nobody has written into since they were kept."""
        for flat in flats:
            if flat.loan is None or flat.shard is None or flat.is_loan_fixed or is_held(flat.loan):
                continue
            # The version tells of writes by torch; what a view from numpy wrote shows in the values alone.
            if flat.loan._version == flat.loan_version and _is_same(
                flat.own_slice(flat.loan), flat.shard.to(flat.loan.dtype)
            ):
                flat.loan = None


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """In every bit: NaN is NaN."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
