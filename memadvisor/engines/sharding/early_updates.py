"""Updating units inside the backward, as soon as their gradients are reduced; and finding out whether that is right.

The script calls `backward()` and, some time later, `optimizer.step()`. Updating before it asks is right if nothing
in between looks at gradients or parameters, and the step is done with the options that were in force in the backward.
So the engine watches one step first, in which everything is updated where it always is:

- how many backwards a step has, and whether DDP synchronises the last one;
- which optimizer each parameter belongs to, and whether it updates elements one by one;
- whether gradients are looked at, clipped, unscaled, dropped or stepped on twice; whether parameters or optimizer
  states are read between the last backward and the step; whether options change there; whether gradients stay for
  the next step; whether a unit's parameters are needed, or gradients of it come, after its reduction.

Reading sharded gradients and parameters goes through us in any case, since a rank has its shard alone. With stage 2,
whose parameters are whole, they are given the class of those that are arriving (arrivals.py) until the step.

In the next backward all ranks tell each other whether they have found a reason against it, since a rank that reads
gradients needs those of the others. If none has, units are updated early from then on; else all is as without it, and a
note says why. One step is enough to watch: the first has no optimizer state yet, so that it needs no more memory with its
gradients kept than later ones with theirs freed. What a later step does that the first did not cannot be made right any
more, and raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch

from memadvisor.engines.sharding.arrivals import Arrivals, drop, put_guard, settle, take_guard
from memadvisor.engines.sharding.flat import Flat, Slot, UnitState
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.engines.sharding.sharded_step import is_elementwise
from memadvisor.engines.sharding.unit_step import Optimizer, Options, changed_option, options_of, step_unit
from memadvisor.run.living import living

_WHAT_TO_DO = "run it without the update in the backward (--update-in-backward, update_in_backward of a plan)"


class EarlyUpdates:
    """Part of an executor.

    Nothing here is played for a schedule without updates in the backward: `is_off` from the start.
    """

    def __init__(self, sharded: ShardedModel, arrivals: Arrivals) -> None:
        self._sharded = sharded
        self._arrivals = arrivals
        self._note = sharded.note
        early = sharded.schedule.updated_in_backward
        self._units = {name: unit for name, unit in sharded.units.items() if name in early}
        self._slots = [
            slot for unit in self._units.values() for flat in unit.trainable for slot in flat.slots
        ]
        self.is_off = not self._units
        self._is_agreed = False  # all ranks update early
        self._reason: str | None = None  # against it, as this rank has found
        self._seen: str | None = None  # a reason, if a step follows
        # How many backwards a step has, and whether the last one is synchronised.
        self._rhythm: tuple[int, bool] | None = None
        self._optimizers: weakref.WeakValueDictionary[str, Optimizer] = weakref.WeakValueDictionary()
        self._known: weakref.WeakSet[Optimizer] | None = None
        self._num_backwards = 0  # whose gradients are summed up now, with the one under way
        self._is_synchronised = False
        self._options: weakref.WeakKeyDictionary[Optimizer, Options] = weakref.WeakKeyDictionary()
        self._due: list[UnitState] = []
        self._held: set[int] = set()  # indices of flats that nobody may read until the step
        self._spent: set[int] = set()  # indices of slots whose gradient an update has used up
        self._zeroed: set[int] = set()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._has_failed = False
        if not self.is_off and sharded.any_order:
            self._switch_off("DDP allows unused parameters (find_unused_parameters or static_graph)")

    # ---- what the executor tells ---------------------------------------------------------------

    def backward_begins(self, is_synchronised: bool) -> None:
        """The first gradient of a backward through the model has come."""
        if self.is_off:
            return
        kept = any(slot.had_gradient and slot.index not in self._zeroed for slot in self._slots)
        if self._spent:
            self._check_spent_before_backward()
        elif self._stepped and kept:
            self._against("gradients of one step are still there in the next backward")
        elif self._num_backwards and not kept and not self._stepped:
            self._against("gradients are dropped without an optimizer step")
        if self._stepped or not kept:
            self._num_backwards = 0
        self._num_backwards += 1
        self._is_synchronised = is_synchronised
        self._let_go(self._held)
        self._due, self._seen = [], None
        for kind in (self._spent, self._zeroed, self._stepped):
            kind.clear()
        for optimizer in self._living():
            self._options[optimizer] = options_of(optimizer)

    def _check_spent_before_backward(self) -> None:
        """Gradients that an update has used up must have been stepped on, and dropped or zeroed, by now."""
        for slot in self._slots:
            if slot.index in self._spent and self._optimizer_of(slot) not in self._stepped:
                self._fail(
                    f"A backward begins before optimizer.step(), though {slot.name!r} has been updated in the last one."
                )
            if slot.index in self._spent and slot.had_gradient and slot.index not in self._zeroed:
                self._fail(
                    f"The gradient of {slot.name!r} from the step before would be added to, and is gone since its "
                    "update in the backward."
                )

    def update(self, unit: UnitState) -> None:
        """A unit's reduction has begun. All ranks are here in the same order."""
        if self.is_off:
            return
        if self._rhythm is not None and not self._is_agreed:
            self._agree(self._rhythm)
        self._due.append(unit)
        self.update_reduced()

    def backward_fails(self) -> None:
        """An exception ends a backward."""
        if self._owes_step:
            self._note(
                "warning",
                "a backward has failed after units had been updated in it; if a variable is said to have been modified "
                f"by an inplace operation, {_WHAT_TO_DO}",
            )

    def update_reduced(self) -> None:
        """Update the units that are due and whose reduction is over."""
        for unit in [u for u in self._due if all(flat.scattering is None for flat in u.trainable)]:
            self._due.remove(unit)
            if not self.is_off and unit.has_come:
                self._update(unit)

    def late_gradient(self, unit: UnitState) -> None:
        """A gradient has come after the unit's reduction began."""
        if any(slot.index in self._spent for flat in unit.trainable for slot in flat.slots):
            self._fail(f"Gradients of unit {unit.name!r} come after its update in the backward.")
        if unit.name in self._units:
            self._against(f"gradients of unit {unit.name!r} come after all of its parameters have theirs")

    def pass_begins(self) -> None:
        """A forward of the model."""
        if self._held and (self._owes_step or not self._stepped):
            self._look("runs the model between the last backward and optimizer.step()")
        self._let_go(self._held)

    def step_begins(self, optimizer: Optimizer, slots: Iterable[Slot]) -> None:
        """An optimizer is about to update `slots`, of any model. Raises where early updates were wrong."""
        if self.is_off:
            return
        ours = {id(slot) for slot in self._slots}
        slots = [slot for slot in slots if id(slot) in ours]
        self._let_go({slot.flat.index for slot in slots})
        if self._is_agreed:
            self._check_step(optimizer, slots)
        elif slots:
            self._learn_from_step(optimizer, slots)
        self._stepped.add(optimizer)

    def _check_step(self, optimizer: Optimizer, slots: list[Slot]) -> None:
        spent = [slot for slot in slots if slot.index in self._spent]
        for slot in spent:
            if self._optimizer_of(slot) is not optimizer:
                self._fail(
                    f"{slot.name!r} has been updated in the backward by another optimizer than the one that steps."
                )
            if (
                optimizer in self._stepped
                and slot.index not in self._zeroed
                and slot.parameter.grad is slot.token
            ):
                self._fail(
                    f"The optimizer steps twice on the gradient of {slot.name!r}, which its first update has used up."
                )
            if optimizer not in self._stepped and slot.parameter.grad is not slot.token:
                self._fail(f"The script drops the gradient of {slot.name!r} before optimizer.step().")
        if spent and optimizer not in self._stepped:
            changed = changed_option(self._options.get(optimizer), options_of(optimizer))
            if changed is not None:
                self._fail(
                    f"The script changes {changed!r} of {type(optimizer).__name__} between backward and "
                    "optimizer.step(), and units have been updated in the backward."
                )

    def _learn_from_step(self, optimizer: Optimizer, slots: list[Slot]) -> None:
        options = self._options.get(optimizer)
        if optimizer in self._stepped:
            self._against("the optimizer steps twice on the same gradients")
        if self._seen is not None:
            self._against(f"the script {self._seen}")
        if any(slot.parameter.grad is not slot.token for slot in slots if slot.index in slot.flat.ready):
            self._against("the script drops gradients before optimizer.step()")
        changed = None if options is None else changed_option(options, options_of(optimizer))
        if changed is not None:
            self._against(f"the script changes {changed!r} between backward and optimizer.step()")
        if getattr(optimizer, "grad_scale", None) is not None:
            self._against("GradScaler scales gradients in the optimizer step")
        if self._known is not None:
            self._known.add(optimizer)
        if options is None or not self._num_backwards:
            return  # it was not known when the backward began: the next step is watched too
        self._rhythm = (self._num_backwards, self._is_synchronised)
        if is_elementwise(optimizer):
            for slot in slots:
                self._optimizers[slot.name] = optimizer

    # ---- what is looked at ----------------------------------------------------------------------

    def look_at_gradient(self, slot: Slot) -> None:
        """Its shard is read or changed; zeroing is not looking."""
        if slot.index in self._spent:
            self._fail(
                f"The gradient of {slot.name!r} is asked for, and is gone since its update in the backward."
            )
        if slot.flat.unit in self._units:
            self._look("looks at gradients, or changes them")

    def zero_gradient(self, slot: Slot) -> None:
        if slot.index in self._spent and self._optimizer_of(slot) not in self._stepped:
            self._fail(f"The script zeroes the gradient of {slot.name!r} before optimizer.step().")
        if slot.flat.unit in self._units and not self._stepped:
            self._seen = "zeroes gradients before optimizer.step()"
        self._zeroed.add(slot.index)

    def read(self, flat: Flat) -> None:
        """A parameter's values are needed, or its optimizer state."""
        if flat.index in self._held:
            where = "in the backward" if self._sharded.hooks.in_backward else "before optimizer.step()"
            self._look(f"needs unit {flat.unit!r} after its backward, {where}")

    def _look(self, what: str) -> None:
        if self._owes_step:
            self._fail(f"The script {what}, and units have been updated in the backward.")
        elif self._stepped:
            self._against(f"the script {what}")
        elif not self._is_agreed:
            self._seen = what

    @property
    def _owes_step(self) -> bool:
        """Whether a unit has been updated whose optimizer has not been asked to step yet."""
        return any(
            slot.index in self._spent and self._optimizer_of(slot) not in self._stepped
            for slot in self._slots
        )

    # ---- updating -------------------------------------------------------------------------------

    @property
    def _is_last_backward(self) -> bool:
        return self._is_agreed and self._rhythm == (self._num_backwards, self._is_synchronised)

    def _update(self, unit: UnitState) -> None:
        optimizer = self._optimizer_of_unit(unit) if self._is_last_backward else None
        if self._is_agreed and optimizer is None:
            return
        if optimizer is not None:
            for flat in unit.trainable:
                if flat.stage < 3:
                    settle(flat)
                    self._arrivals.replaced.take_values([flat])
                    if flat.has_masters:
                        flat.keep_written()
                else:
                    drop(flat)  # gathered ahead for no use, from the shards that are written to now
            with torch.no_grad():
                step_unit(optimizer, unit)
            self._spent.update(slot.index for flat in unit.trainable for slot in flat.slots)
        for flat in unit.trainable:
            self._hold(flat)

    def _hold(self, flat: Flat) -> None:
        """Nobody may read a flat's parameters from here on until the optimizer steps."""
        self._held.add(flat.index)
        if flat.stage == 3:
            return
        if not self._arrivals.can_wait(flat):
            self._against("modules are compiled or scripted, or parameters have classes of their own")
            return
        this = weakref.ref(self)

        def looked_at() -> None:
            updates = this()
            if updates is not None:
                updates.read(flat)

        put_guard(flat, looked_at)

    def _let_go(self, flats: Collection[int]) -> None:
        for flat in self._sharded.flats if self._held and flats else ():
            if flat.index in flats:
                take_guard(flat)
        self._held = self._held.difference(flats)

    def end(self) -> None:
        """The engine is taken off. Raises where a step is owed, since gradients cannot be given back."""
        if self._owes_step and not self._has_failed:
            self._fail(
                "The plan is taken off between a backward that has updated units and its optimizer.step()."
            )
        self._let_go(self._held)

    # ---- inside ----------------------------------------------------------------------------------

    def _agree(self, rhythm: tuple[int, bool]) -> None:
        """All ranks together: early updates begin, or never do."""
        mine = [int(self._reason is not None), rhythm[0], -rhythm[0], int(rhythm[1]), -int(rhythm[1])]
        found = self._sharded.wire.largest(mine)
        if self._reason is None and not any(self._optimizer_of_unit(unit) for unit in self._units.values()):
            self._reason = "no unit has all its parameters in one optimizer that updates elements one by one"
        if found[1] != -found[2] or found[3] != -found[4]:
            self._reason = self._reason or "ranks take different numbers of backwards a step"
        if found[0] or self._reason is not None:
            self._switch_off(self._reason or "another rank has found a reason")
        self._is_agreed = not self.is_off

    def _switch_off(self, reason: str) -> None:
        self.is_off = True
        self._let_go(self._held)
        self._note(
            "warning",
            f"units are not updated in the backward, but in the optimizer step, because {reason}; this takes more memory "
            "than the plan says",
        )

    def _against(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _fail(self, what: str) -> None:
        self._has_failed = True
        raise RuntimeError(f"{what} The steps before it did not do so; {_WHAT_TO_DO}.")

    def _living(self) -> Iterable[Optimizer]:
        """Optimizers that there are; looking for them once takes some 30 ms."""
        if self._is_agreed:
            return set(self._optimizers.values())
        if self._known is None:
            self._known = weakref.WeakSet(living(Optimizer))
        return [optimizer for optimizer in self._known if hasattr(optimizer, "param_groups")]

    def _optimizer_of(self, slot: Slot) -> Optimizer | None:
        return self._optimizers.get(slot.name)

    def _optimizer_of_unit(self, unit: UnitState) -> Optimizer | None:
        """The one that updates all of a unit, elements one by one."""
        found = {self._optimizer_of(slot) for flat in unit.trainable for slot in flat.slots}
        return found.pop() if len(found) == 1 else None
