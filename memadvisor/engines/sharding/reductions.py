"""From autograd's gradients to reduced ones: flat buffers, one order for all ranks, unused parameters.

A unit is reduced when all its gradients are there and its turn has come. Two ranks that reduced different
units at the same time would add up gradients of different parameters, so the order is agreed on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from memadvisor.engines.collectives.joint_means import begin_joint_means
from memadvisor.engines.lanes.lanes import Ticket
from memadvisor.engines.sharding.dropped import is_ours, leave_to_script, let_go_of_dropped
from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.feedback import Feedback
from memadvisor.engines.sharding.flat import Slot, UnitState
from memadvisor.engines.sharding.gradient_hooks import GradientHooks, check_hooked
from memadvisor.engines.sharding.holders import is_held
from memadvisor.engines.sharding.local_steps import LocalSteps
from memadvisor.engines.sharding.scatterings import Scatterings
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.errors import PlanError
from memadvisor.schedule import Action, Ranks

# Each rank updates a share of the parameters for all: what a rank alone would step on is in no other's.
_NOT_AVERAGED = (
    "An optimizer steps on gradients that DistributedDataParallel was told not to average (no_sync), as local SGD does. With "
    "ZeRO stages 1 to 3 ranks cannot part, so losses differ from those without the plan, unless the script averages "
    "gradients by itself: --zero 0 leaves the steps as they are."
)


@dataclass(slots=True, eq=False)
class _Backward:
    """The backward under way: which units have all their gradients, and whose reductions were begun."""

    touched: bool = False
    done: list[str] = field(default_factory=list)
    num_reduced: int = 0
    in_flight: list[Ticket] = field(default_factory=list)  # means, until the end of the backward
    merging: dict[tuple[str, ...], list[UnitState]] = field(
        default_factory=dict
    )  # whose turn has come, by message


class Player(Protocol):
    """Who plays the schedule where a unit's gradients are all there, and where its turn to be reduced has come."""

    def unit_backward_ends(self, unit: UnitState) -> None: ...
    def reduce_unit(self, unit: UnitState) -> None: ...


class Reductions:
    """Part of an executor, which is its player."""

    def __init__(self, sharded: ShardedModel, early: EarlyUpdates, player: Player) -> None:
        self._sharded = sharded
        self._early = early
        self._player = player
        self._units = sharded.units
        self._slots = sharded.slots
        self._wire = sharded.wire
        self.feedback = Feedback(sharded.wire, sharded.schedule.compression)
        self.local_steps = LocalSteps(sharded)
        self._scatterings = Scatterings(sharded)
        self._gradient_hooks = GradientHooks(sharded.units.values(), self)
        self._order = [unit.name for unit in reversed(self._units.values()) if unit.trainable]
        self._order_known = False
        self._sync = True  # whether the backward to come ends in a reduction (no_sync, local SGD)
        self._through_ddp = True
        self._awaits_backward = False  # of a forward through DDP
        self._is_averaged = True  # as DDP was to do with the gradients that came last
        self._has_warned = False
        self._missing: list[str] = []
        self._backward = _Backward()
        self._stepped_after = -1  # how many backwards there had been when the optimizer stepped last
        self._is_to_meet = False  # with the others, before their next pass

    def detach(self) -> None:
        self._gradient_hooks.remove()

    # ---- around a backward -------------------------------------------------------------------

    def expect(self, through_ddp: bool, require_sync: bool) -> None:
        """A forward with gradients begins; what it says holds for the backwards that follow. One past DDP, between a forward
        through it and its backward, changes nothing of what DDP does there."""
        if self._awaits_backward and not through_ddp:
            return
        self._awaits_backward = through_ddp
        self._sync = self.local_steps.expect(through_ddp, through_ddp and require_sync)
        self._through_ddp = through_ddp
        if self._sync and self._missing:
            missing, self._missing = self._missing, []
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new one: "
                f"no gradient came for {', '.join(missing[:5])}. Pass find_unused_parameters=True to "
                "torch.nn.parallel.DistributedDataParallel, as without a plan."
            )

    def begin(self) -> None:
        self.let_go()
        self._gradient_hooks.come_last()
        self._scatterings.abandon()
        self._backward = _Backward()
        for unit in self._units.values():
            unit.has_come = False
        for flat in self._sharded.flats:
            flat.ready.clear()
        with torch._C.DisableTorchFunctionSubclass():  # gradients are looked at, not values
            for slot in self._slots:
                if slot.token is not None:
                    self._hide_token(slot)

    def _hide_token(self, slot: Slot) -> None:
        # Autograd would add the new gradient to the token; it must find nothing there.
        gradient = slot.parameter.grad
        slot.had_gradient = gradient is slot.token
        if gradient is not None and gradient is not slot.token:
            raise PlanError(
                f"The script sets the gradient of {slot.name!r} itself, which ZeRO stage {slot.flat.stage} shards.",
                hint="use --zero 1.",
            )
        slot.parameter.grad = None

    def end(self, failed: bool) -> bool:
        """Whether this backward was one of this model's."""
        if self._backward.touched and not failed:
            self._awaits_backward = False
            self._finish()
            self.local_steps.backward_ends()
            self._early.update_reduced()
        elif failed:
            self._early.backward_fails()
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self._slots:
                if slot.token is not None and slot.had_gradient and slot.parameter.grad is None:
                    slot.parameter.grad = slot.token
        return self._backward.touched

    def _finish(self) -> None:
        """Reduce what is left, in the one order, and agree on which parameters no rank used."""
        used = [int(slot.index in slot.flat.ready) for slot in self._slots]
        absent = [slot for slot in self._slots if slot.flat.trainable and not used[slot.index]]
        self._fill_with_zeros(absent)
        while self._backward.num_reduced < len(self._order):
            self._reduce_next()
        # The script may read p.grad from here on: without the wait it would see its own rank's gradient.
        for transfer in self._backward.in_flight:
            transfer.wait()  # in their order: of those that fail, the first is the cause
        self._backward.in_flight.clear()
        self._scatterings.end()
        if self._sharded.is_alone:
            pass  # as without a plan: what got no gradient has none
        elif self._sharded.any_order and (self._sync or self._sharded.num_shared_stages >= 2):
            used = self._wire.largest(used)
        elif absent:
            self._missing = [slot.name for slot in absent] if self._sync else []
            used = [int(slot.flat.trainable) for slot in self._slots]
        for slot in self._slots:
            if slot.flat.trainable and used[slot.index]:
                slot.had_gradient = True
                if slot.parameter.grad is None and slot.flat.stage < 2 and self._sync:
                    slot.parameter.grad = self._gradient_view(slot).data
        if not self._order_known:
            self._agree_on_order()

    def _fill_with_zeros(self, absent: list[Slot]) -> None:
        """A parameter that some other rank may have used takes part with a zero gradient, as under DDP."""
        with torch.no_grad():
            for slot in absent:
                if self._sharded.is_alone:
                    if slot.flat.grad is not None:  # of others; it must not be left as the memory was
                        self._gradient_view(slot).zero_()
                elif slot.flat.loose is not None:
                    slot.flat.loose.add_zeros(slot)
                elif slot.flat.stage >= 2 or (self._sync and slot.parameter.grad is None):
                    self._gradient_view(slot).zero_()

    def _agree_on_order(self) -> None:
        """From the second backward on, units are reduced in the order in which rank 0 finished them.

        Units that rank 0 did not finish come last: what comes after them waits with its full gradient.
        """
        names = list(self._units)
        done = self._backward.done + [name for name in self._order if name not in self._backward.done]
        order = self._wire.broadcast([names.index(name) for name in done])
        self._order = [names[number] for number in order]
        self._order_known = True

    # ---- inside a backward -------------------------------------------------------------------

    def accumulated(self, name: str, slot: Slot) -> None:
        """Autograd has added to a parameter's gradient: move it into the flat buffer of its unit, which is called `name`."""
        unit, flat, parameter = self._units[name], slot.flat, slot.parameter
        if not self._backward.touched:
            self._backward.touched = True
            self._is_averaged = self._sync
            self._early.backward_begins(self._sync)
        if unit.has_come:
            self._early.late_gradient(unit)
            if not self._sharded.is_alone:
                self._refuse_late(slot)
        if flat.stage >= 2 and not self._through_ddp:
            raise PlanError(
                "The script runs a backward through the model inside DistributedDataParallel, past DDP itself.",
                hint="use --zero 1, which leaves such gradients alone as DDP does.",
            )
        is_whole = flat.loose is None and self._is_whole_buffer(slot)
        if slot.has_hooks or parameter.grad is None:
            check_hooked(slot, is_buffer=is_whole or is_ours(slot))
        with torch.no_grad():
            if is_whole:
                self._adopt(slot)
            gradient = parameter.grad
            if gradient is None:
                raise AssertionError("a gradient that is not there has been accumulated")
            if flat.stage >= 2:
                self._take_share(slot, gradient)
                parameter.grad = None
            elif gradient.data_ptr() != (view := self._gradient_view(slot)).data_ptr():
                view.copy_(gradient)
                if slot.has_hooks and not gradient.requires_grad:
                    gradient.data = view  # a hook may keep it, to look at the mean
                else:
                    parameter.grad = view.data  # `grad.detach_()` is for what is no view
        flat.ready.add(slot.index)
        if all(len(other.ready) == len(other.slots) for other in unit.trainable):
            self._unit_backward_ends(unit)

    def _refuse_late(self, slot: Slot) -> None:
        """What comes once more, behind all of its unit's, would be added to what other ranks have, or have taken, already.

        DDP waits for it where it is told of a static graph: it counts in the first backward how often each comes.
        """
        raise PlanError(
            f"The gradient of {slot.name!r} comes again in one backward, behind all of its unit's: the unit runs several times, "
            "and reentrant checkpoints have a backward each.",
            hint="give checkpoint use_reentrant=False, or run without a plan.",
        )

    def _is_whole_buffer(self, slot: Slot) -> bool:
        """Whether autograd's new gradient is all that the flat's buffer would hold: an embedding's, a head's."""
        flat, gradient = slot.flat, slot.parameter.grad
        if gradient is None or flat.grad is not None or len(flat.slots) > 1 or gradient.requires_grad:
            return False
        if not slot.has_hooks and is_held(gradient):
            return False  # autograd may give views of one tensor's memory to several parameters
        num_elements = flat.padded_numel if flat.stage >= 2 else flat.num_elements
        whole_bytes = num_elements * flat.reduce_dtype.itemsize
        is_alike = gradient.stride() == slot.stride and gradient.dtype == flat.reduce_dtype
        return is_alike and gradient.untyped_storage().nbytes() == whole_bytes

    def _adopt(self, slot: Slot) -> None:
        # Autograd has given the tensor to the parameter alone, so a copy of it would serve nobody.
        flat, gradient = slot.flat, slot.parameter.grad
        if gradient is not None:
            flat.grad = gradient.detach().as_strided((flat.num_elements,), (1,))
            self._sharded.label(flat.grad, "gradient", flat.unit)

    def _take_share(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Take over a gradient that will be sharded, divided by the ranks (before the sum, as DDP does)."""
        share = 1.0 / self._wire.num_contributions
        if slot.flat.loose is not None:
            slot.flat.loose.take(slot, gradient, share)
            return
        view = self._gradient_view(slot)
        if slot.index in slot.flat.ready:
            view.add_(gradient, alpha=share)
        elif gradient.itemsize >= view.itemsize:
            torch.mul(gradient, share, out=view)  # one pass, also where the gradient is the buffer
        else:
            view.copy_(gradient).mul_(share)

    def _gradient_view(self, slot: Slot) -> torch.Tensor:
        flat = slot.flat
        if flat.grad is None:
            numel = flat.padded_numel if flat.stage >= 2 else flat.num_elements
            flat.grad = flat.new(numel, flat.reduce_dtype)
            flat.grad[flat.num_elements :].zero_()
            self._sharded.label(flat.grad, "gradient", flat.unit)
        return slot.view(flat.grad)

    def _unit_backward_ends(self, unit: UnitState) -> None:
        if unit.has_come:
            return
        unit.has_come = True
        self._backward.done.append(unit.name)
        if self._sharded.is_alone:  # nobody else's order counts
            self._order.remove(unit.name)
            self._order.insert(self._backward.num_reduced, unit.name)
        self._player.unit_backward_ends(unit)
        while self._is_next_unit_there():
            self._reduce_next()

    def _is_next_unit_there(self) -> bool:
        position = self._backward.num_reduced
        return position < len(self._order) and self._units[self._order[position]].has_come

    def _reduce_next(self) -> None:
        unit = self._units[self._order[self._backward.num_reduced]]
        self._backward.num_reduced += 1
        self._player.reduce_unit(unit)

    # ---- actions and buffers -----------------------------------------------------------------

    def reduce(self, unit: UnitState, action: Action) -> None:
        with torch.no_grad():
            if action.ranks is Ranks.ACROSS:
                self._scatterings.sum_across(action)
                return
            self._scatterings.make_room()
            if action.units:
                self._merge(unit, action.units)
                return
            for flat in unit.trainable:
                if action.shard:
                    self._scatterings.begin(flat, action)
                elif flat.grad is not None and self._sync:
                    self._sharded.remember("all_reduce", flat)
                    transfer = self.feedback.begin_mean(flat, flat.grad)
                    if action.overlaps:
                        self._backward.in_flight.append(transfer)
                    else:
                        transfer.wait()

    def _merge(self, unit: UnitState, names: tuple[str, ...]) -> None:
        """A unit's turn has come; with the last of those that share a message it is sent."""
        units = self._backward.merging.setdefault(names, [])
        units.append(unit)
        if not self._sync or len(units) < len(names):
            return
        grads = []
        for flat in (flat for each in units for flat in each.trainable):
            if flat.grad is not None:
                self._sharded.remember("all_reduce", flat)
                grads.append(flat.grad)
        self._backward.in_flight += begin_joint_means(self._wire, grads, ", ".join(names))

    def step_begins(self) -> None:
        """All ranks have met for an optimizer step on sharded gradients or states."""
        self._sharded.have_met()
        if not self._is_averaged and not self._has_warned:
            self._has_warned = True
            self._sharded.note("warning", _NOT_AVERAGED)
        self._stepped_after = self._sharded.num_backwards

    def sweep(self, *, together: bool) -> None:
        """Let go of gradient buffers whose parameters have no gradient any more (`zero_grad`).

        together: all ranks come by here, and meet first: another may still be reading, by itself, what goes now or before
        the next backward. A pass of one rank alone, an evaluation, may have let go of what tells that it is to meet.
        """
        self._is_to_meet = self._is_to_meet or self._is_done_with_some()
        if together and self._is_to_meet:
            self._sharded.meet()
        if together:
            self._is_to_meet = False
        self.let_go()

    def let_go(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # gradients are looked at, not values
            leave_to_script(self._slots)
            for flat in self._sharded.flats:
                if flat.trainable:
                    let_go_of_dropped(flat)

    def _is_done_with_some(self) -> bool:
        """Whether there are sharded gradients that the script has dropped, or stepped on: it will not need them again."""
        stepped = self._stepped_after == self._sharded.num_backwards
        return not self._sharded.is_alone and any(
            flat.stage >= 2
            and flat.has_gradient
            and (stepped or any(slot.parameter.grad is None for slot in flat.slots))
            for flat in self._sharded.flats
        )
