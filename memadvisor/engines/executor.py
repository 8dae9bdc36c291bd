"""The executor: plays a schedule on one live model, at the boundaries of its units.

Forward boundaries come from global module hooks, backward ones from hooks on output tensors and from
gradients that have been accumulated. Everything runs on the compute lane: a collective is waited for
where it is issued. docs/engines.md says which buffers exist when.

Two kinds of reading a stage-3 parameter: in a training pass through DDP all ranks gather together; in
any other (evaluation, a pass on one rank, a look at a parameter) a rank asks the others' service
threads (service.py), so that nobody has to take part who does not know of it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memadvisor.engines.flat import Flat, Slot, flats_of
from memadvisor.engines.gradients import ShardedGradient
from memadvisor.engines.hooks import Hooks
from memadvisor.engines.live import LiveModel, LiveUnit
from memadvisor.engines.released import hide, show
from memadvisor.engines.saved import SavedParameters
from memadvisor.engines.service import Service
from memadvisor.engines.wire import Wire
from memadvisor.errors import PlanError
from memadvisor.schedule import ActionKind, Point, Schedule

Label = Callable[[torch.Tensor, str, str], None]
Labelled = tuple[torch.Tensor, str, str]


@dataclass(slots=True, eq=False)
class UnitState:
    """A unit as the executor sees it; `depth` counts the calls into it that are under way."""

    live: LiveUnit
    stage: int
    flats: list[Flat]
    depth: int = 0
    saving: int = 0

    @property
    def name(self) -> str:
        return self.live.name

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    @property
    def present(self) -> bool:
        return all(flat.present for flat in self.flats)


@dataclass(slots=True, eq=False)
class _Backward:
    """The backward under way: which units have all their gradients, and which were reduced."""

    touched: bool = False
    done: list[str] = field(default_factory=list)
    num_reduced: int = 0


class Executor:
    """Plays `schedule` on `model`, whose DDP wrapper is `ddp`. Kept alive by that wrapper alone."""

    def __init__(
        self,
        model: LiveModel,
        schedule: Schedule,
        ddp: Any,
        hooks: Hooks,
        label: Label,
        any_order: bool,
        service: Callable[[Executor], Service],
    ) -> None:
        self.model = model
        self.schedule = schedule
        self.hooks = hooks
        self.label = label
        self.unit = ""  # whose staging is being allocated
        self.wire = Wire(ddp.process_group, lambda tensor: label(tensor, "communication", self.unit))
        self.any_order = any_order  # ranks may use different parameters (find_unused_parameters)
        self.collective = False  # whether the pass under way is one that all ranks take together
        self.missing: list[str] = []
        self.digest = 0
        # How far this rank has come: what a service thread needs to know before it answers.
        self.num_backwards = 0
        self.num_steps = 0
        self.num_writes = 0
        self.in_step = False
        self._ddp = weakref.ref(ddp)
        self._sync = True  # whether the backward to come ends in a reduction (no_sync)
        self._through_ddp = True
        self._order_known = False
        self._backward = _Backward()
        self._handles: list[Any] = []
        self.optimizers: set[torch.optim.Optimizer] = set()  # their state is asked for as long as we are
        self.units = self._build_units()
        self.order = [unit.name for unit in reversed(self.units.values()) if unit.trainable]
        self.slots = [slot for flat in self.flats for slot in flat.slots]
        for index, slot in enumerate(self.slots):
            slot.index = index
        self.service = service(self)
        self._move_parameters()
        self._attach()

    # ---- construction ------------------------------------------------------------------------

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units.values() for flat in unit.flats]

    @property
    def is_orphan(self) -> bool:
        """Whether the script has let go of its DDP wrapper."""
        return self._ddp() is None

    @property
    def num_shared_stages(self) -> int:
        """The highest stage of any unit."""
        return max((unit.stage for unit in self.units.values()), default=0)

    def _build_units(self) -> dict[str, UnitState]:
        stages = {unit.name: unit.zero_stage for unit in self.schedule.units}
        units: dict[str, UnitState] = {}
        count = 0
        for live in self.model.units:
            flats = flats_of(live, stages[live.name], self.wire.rank, self.wire.num_ranks, count)
            count += len(flats)
            units[live.name] = UnitState(live, stages[live.name], flats)
        return units

    def _move_parameters(self) -> None:
        """Move parameters into flat storage, and release those of stage 3."""
        with torch.no_grad():
            for flat in self.flats:
                if flat.stage == 0:
                    continue
                flat.full = flat.new(flat.padded_numel)
                flat.full[flat.num_elements :].zero_()
                for slot in flat.slots:
                    slot.view(flat.full).copy_(slot.parameter)
                    slot.parameter.data = slot.view(flat.full)
                flat.shard = flat.own_slice(flat.full)
                if flat.stage == 3:
                    flat.shard = flat.shard.clone()
                    self._release(flat)
                for slot in flat.slots:
                    slot.token = ShardedGradient(slot, self) if flat.stage >= 2 and flat.trainable else None

    def _attach(self) -> None:
        modules = {id(self.model.root)}
        if self.num_shared_stages == 3:
            modules |= set(self.model.uses)
        self.hooks.observe(self, modules)
        this = weakref.ref(self)
        for unit in self.units.values():
            for flat in unit.trainable:
                for slot in flat.slots:
                    hook = _accumulated_hook(this, unit.name, slot)
                    parameter: Any = slot.parameter
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        self.hooks.forget(self)
        while self._handles:
            self._handles.pop().remove()
        self.service.stop()

    # ---- forward -----------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module) -> None:
        if module is self.model.root and not self.hooks.in_backward:
            self._pass_begins()
        for name in self.model.uses.get(id(module), ()):
            unit = self.units[name]
            if unit.stage == 3:
                unit.depth += 1
                if unit.depth == 1:
                    self._play(Point.BEFORE_FORWARD, unit)
                if torch.is_grad_enabled():
                    unit.saving += SavedParameters.push(self)

    def leave_module(self, module: torch.nn.Module, output: Any) -> None:
        for name in reversed(self.model.uses.get(id(module), ())):
            unit = self.units[name]
            if unit.stage != 3 or unit.depth == 0:
                continue
            unit.depth -= 1
            if unit.depth == 0:
                while unit.saving:
                    SavedParameters.pop()
                    unit.saving -= 1
                if not self.hooks.in_backward:
                    # A pass inside the backward recomputes; its parameters are needed again at once.
                    self._mark_backward(unit, output)
                    self._play(Point.AFTER_FORWARD, unit)
        if module is self.model.root and not self.hooks.in_backward:
            self.collective = False

    def _pass_begins(self) -> None:
        self.sweep()
        ddp = self._ddp()
        through_ddp = ddp is not None and type(ddp)._active_ddp_module is ddp
        training = torch.is_grad_enabled() and self.model.root.training
        if through_ddp and training and self.num_shared_stages == 3:
            self.meet()
            self.end_loans()
        self.collective = through_ddp and training and not self.any_order
        if ddp is not None and torch.is_grad_enabled():
            self._sync = through_ddp and ddp.require_backward_grad_sync
            self._through_ddp = through_ddp
            if self._sync and self.missing:
                missing, self.missing = self.missing, []
                raise RuntimeError(
                    "Expected to have finished reduction in the prior iteration before starting a new one: "
                    f"no gradient came for {', '.join(missing[:5])}. Pass find_unused_parameters=True to "
                    "torch.nn.parallel.DistributedDataParallel, as without a plan."
                )

    def _mark_backward(self, unit: UnitState, output: Any) -> None:
        """Have the unit's backward announced by the gradients of its outputs."""
        if not torch.is_grad_enabled():
            return
        this, collective = weakref.ref(self), self.collective

        def announced(gradient: torch.Tensor) -> None:
            executor = this()
            if executor is not None:
                executor.collective = collective
                executor._unit_backward_begins(unit)

        leaves: list[Any] = tree_leaves(output)
        for tensor in leaves:
            if issubclass(type(tensor), torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(announced)

    # ---- backward ----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        self.sweep()
        self._backward = _Backward()
        for slot in self.slots:
            slot.flat.ready.clear()
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

    def _unit_backward_begins(self, unit: UnitState) -> None:
        if not self.hooks.in_backward:
            return
        for other in self.units.values():
            # Units without gradients of their own have no other sign that their backward is over.
            if other is not unit and other.stage == 3 and not other.trainable and other.depth == 0:
                self._release_unit(other)
        self._play(Point.BEFORE_BACKWARD, unit)

    def accumulated(self, name: str, slot: Slot) -> None:
        """Autograd has added to a parameter's gradient: move it into the unit's flat buffer."""
        flat, parameter = slot.flat, slot.parameter
        self._backward.touched = True
        if flat.stage >= 2 and not self._through_ddp:
            raise PlanError(
                "The script runs a backward through the model inside DistributedDataParallel, past DDP itself.",
                hint="use --zero 1, which leaves such gradients alone as DDP does.",
            )
        with torch.no_grad():
            view = self._gradient_view(slot)
            if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
                if flat.stage >= 2 and slot.index in flat.ready:
                    view.add_(parameter.grad)
                else:
                    view.copy_(parameter.grad)
                parameter.grad = view if flat.stage < 2 else None
        flat.ready.add(slot.index)
        unit = self.units[name]
        if all(len(other.ready) == len(other.slots) for other in unit.trainable):
            self._unit_backward_ends(unit)

    def _gradient_view(self, slot: Slot) -> torch.Tensor:
        flat = slot.flat
        if flat.grad is None:
            flat.grad = flat.new(flat.padded_numel if flat.stage >= 2 else flat.num_elements)
            flat.grad[flat.num_elements :].zero_()
            self.label(flat.grad, "gradient", flat.unit)
        return slot.view(flat.grad)

    def _unit_backward_ends(self, unit: UnitState) -> None:
        if unit.name in self._backward.done:
            return
        self._backward.done.append(unit.name)
        if unit.stage == 3:
            self._play(Point.AFTER_BACKWARD, unit, ActionKind.RELEASE)
        # Reductions go in one order on every rank: two ranks that reduce different units at the same
        # time would add up gradients of different parameters.
        while self._next_unit() in self._backward.done:
            self._reduce_next()

    def _next_unit(self) -> str | None:
        position = self._backward.num_reduced
        return self.order[position] if position < len(self.order) else None

    def _reduce_next(self) -> None:
        unit = self.units[self.order[self._backward.num_reduced]]
        self._backward.num_reduced += 1
        self._play(Point.AFTER_BACKWARD, unit, ActionKind.REDUCE)

    def backward_ends(self, failed: bool) -> None:
        if self._backward.touched and not failed:
            self._finish_backward()
        for unit in self.units.values():
            if unit.stage == 3:
                self._release_unit(unit)
        for slot in self.slots:
            if slot.token is not None and slot.had_gradient and slot.parameter.grad is None:
                slot.parameter.grad = slot.token
        self.num_backwards += self._backward.touched
        self.collective = False

    def _finish_backward(self) -> None:
        """Reduce what is left, in the one order, and agree on which parameters no rank used."""
        used = [int(slot.index in slot.flat.ready) for slot in self.slots]
        absent = [slot for slot in self.slots if slot.flat.trainable and not used[slot.index]]
        self._fill_with_zeros(absent)
        while self._backward.num_reduced < len(self.order):
            self._reduce_next()
        if self.any_order and (self._sync or self.num_shared_stages >= 2):
            used = self.wire.largest(used, self.slots[0].flat.device)
        elif absent:
            self.missing = [slot.name for slot in absent] if self._sync else []
            used = [int(slot.flat.trainable) for slot in self.slots]
        for slot in self.slots:
            if slot.flat.trainable and used[slot.index]:
                slot.had_gradient = True
                if slot.parameter.grad is None and slot.flat.stage < 2 and self._sync:
                    slot.parameter.grad = self._gradient_view(slot)
        if not self._order_known:
            self._agree_on_order()

    def _fill_with_zeros(self, absent: list[Slot]) -> None:
        """A parameter that some other rank may have used takes part with a zero gradient, as under DDP."""
        with torch.no_grad():
            for slot in absent:
                if slot.flat.stage >= 2 or (self._sync and slot.parameter.grad is None):
                    self._gradient_view(slot).zero_()

    def _agree_on_order(self) -> None:
        """From the second backward on, units are reduced in the order in which rank 0 finished them.

        Units that rank 0 did not finish come last: what comes after them waits with its full gradient.
        """
        names = list(self.units)
        done = self._backward.done + [name for name in self.order if name not in self._backward.done]
        order = self.wire.broadcast([names.index(name) for name in done], self.slots[0].flat.device)
        self.order = [names[number] for number in order]
        self._order_known = True

    # ---- actions -----------------------------------------------------------------------------

    def _play(self, point: Point, unit: UnitState, only: ActionKind | None = None) -> None:
        self.unit = unit.name
        for action in self.schedule.at(point, unit.name):
            if only is not None and action.kind is not only:
                continue
            if action.kind is ActionKind.GATHER:
                self.gather_unit(unit)
            elif action.kind is ActionKind.RELEASE:
                self._release_unit(unit)
            elif action.kind is ActionKind.REDUCE:
                self._reduce(unit, action.shard)
            # RECOMPUTE is played by recompute.py, which wraps the unit's own forward.

    def gather_unit(self, unit: UnitState) -> None:
        for flat in unit.flats:
            self.gather(flat)

    def gather(self, flat: Flat, collective: bool | None = None) -> None:
        """Make a stage-3 flat present; nothing happens when it is."""
        if flat.present or flat.full is None or flat.shard is None:
            return
        with torch.no_grad():
            flat.full.untyped_storage().resize_(flat.padded_numel * flat.dtype.itemsize)
            self.label(flat.full, "parameter", flat.unit)
            self.fill(flat, flat.full, self.collective if collective is None else collective)
            for slot in flat.slots:
                show(slot, flat.full)

    def fill(self, flat: Flat, full: torch.Tensor, collective: bool) -> None:
        """Write a flat's parameters, from all ranks, into `full`."""
        if flat.shard is None:
            raise AssertionError("a flat without a shard has nothing to gather")
        if collective:
            self._remember("gather", flat)
            self.wire.gather(full, flat.shard)
        elif flat.loan is not None:
            full.copy_(flat.loan)
        else:
            self.service.fetch_parameters(flat, full)

    def _release_unit(self, unit: UnitState) -> None:
        if unit.depth == 0 or self.hooks.in_backward:
            for flat in unit.flats:
                self._release(flat)

    def _release(self, flat: Flat) -> None:
        if flat.full is not None and flat.present:
            if flat.shard is not None and any(slot.is_written for slot in flat.slots):
                flat.shard.copy_(flat.own_slice(flat.full))
            for slot in flat.slots:
                hide(slot, self)
            flat.full.untyped_storage().resize_(0)

    def _reduce(self, unit: UnitState, shard: bool) -> None:
        with torch.no_grad():
            for flat in unit.trainable:
                if flat.grad is None:
                    continue
                if shard:
                    self._remember("reduce_scatter", flat)
                    self._reduce_to_shard(flat, flat.grad)
                elif self._sync:
                    self._remember("all_reduce", flat)
                    self.wire.mean(flat.grad)

    def _reduce_to_shard(self, flat: Flat, grad: torch.Tensor) -> None:
        own = self.wire.reduce_scatter_mean(grad)
        if flat.grad_shard is None:
            flat.grad_shard = own.clone()
            self.label(flat.grad_shard, "gradient", flat.unit)
        else:
            flat.grad_shard.add_(own)
        flat.grad = None

    def _remember(self, operation: str, flat: Flat) -> None:
        self.digest = zlib.crc32(f"{operation} {flat.index}".encode(), self.digest)

    # ---- the optimizer step ------------------------------------------------------------------

    def step_begins(self) -> None:
        """All ranks meet here, so that none updates what another is still reading."""
        for unit in self.units.values():
            if unit.stage == 3:
                self._release_unit(unit)
        found = self.wire.largest([self.digest, -self.digest], self.flats[0].device)
        if found[0] != -found[1]:
            raise RuntimeError("the ranks ran different units of the model in this step")
        self.end_loans()
        self.in_step = True

    def step_ends(self, flats: Iterable[Flat]) -> None:
        """Bring what this optimizer has updated to all ranks."""
        stepped = {flat.index for flat in flats}
        with torch.no_grad():
            for action in self.schedule.at(Point.AFTER_OPTIMIZER):
                unit = self.units.get(action.unit)
                for flat in unit.trainable if unit is not None else ():
                    if flat.index in stepped and flat.full is not None and flat.shard is not None:
                        self.wire.gather(flat.full, flat.shard)
        self.num_steps += 1
        self.in_step = False  # after the count: a question about this step may be answered from here on

    # ---- gradients that the script has dropped -----------------------------------------------

    def sweep(self) -> None:
        """Let go of gradient buffers whose parameters have no gradient any more (`zero_grad`)."""
        for flat in self.flats:
            if not flat.trainable:
                continue
            if flat.stage >= 2:
                dropped = [slot for slot in flat.slots if slot.parameter.grad is None]
                if len(dropped) == len(flat.slots):
                    flat.grad_shard = None
                elif flat.grad_shard is not None:
                    for slot in dropped:
                        slot.piece(flat.grad_shard).zero_()
            elif flat.grad is not None and not any(self._is_ours(slot) for slot in flat.slots):
                flat.grad = None

    def _is_ours(self, slot: Slot) -> bool:
        gradient, buffer = slot.parameter.grad, slot.flat.grad
        if gradient is None or buffer is None:
            return False
        return bool(gradient.untyped_storage()._cdata == buffer.untyped_storage()._cdata)

    # ---- full copies lent to the script ------------------------------------------------------

    def lend(self, slot: Slot) -> torch.Tensor:
        """Full values of a released parameter, in memory of their own."""
        flat = slot.flat
        if flat.loan is None:
            with torch.no_grad():
                loan = flat.new(flat.padded_numel)
                self.label(loan, "parameter", flat.unit)
                self.fill(flat, loan, self.collective)
                flat.loan = loan
        return slot.view(flat.loan)

    def meet(self) -> None:
        """Wait for all ranks: whatever they read before this point of the program, they have read."""
        self.wire.largest([0], self.flats[0].device)

    def keep_writes(self, slot: Slot) -> None:
        """The script has written into a lent parameter, as every rank does at this point."""
        self._keep(slot.flat)
        self.num_writes += 1

    def _keep(self, flat: Flat) -> None:
        if flat.loan is not None and flat.shard is not None:
            with torch.no_grad():
                flat.shard.copy_(flat.own_slice(flat.loan))

    def end_loans(self) -> None:
        """Take loans back, with what was written past us (`p.data`); only after a meeting of all ranks."""
        for flat in self.flats:
            self._keep(flat)
            flat.loan = None

    # ---- what is alive -----------------------------------------------------------------------

    def labelled_tensors(self) -> Iterator[Labelled]:
        for flat in self.flats:
            for tensor, category in (
                (flat.full, "parameter"),
                (flat.shard, "parameter"),
                (flat.loan, "parameter"),
                (flat.grad, "gradient"),
                (flat.grad_shard, "gradient"),
            ):
                if tensor is not None:
                    yield tensor, category, flat.unit


def _accumulated_hook(
    executor: weakref.ref[Executor], unit: str, slot: Slot
) -> Callable[[torch.Tensor], None]:
    reference = weakref.ref(slot)

    def accumulated(parameter: torch.Tensor) -> None:
        owner, place = executor(), reference()
        if owner is not None and place is not None:
            owner.accumulated(unit, place)

    return accumulated


def all_labelled(executors: Iterable[Executor]) -> Iterator[Labelled]:
    for executor in executors:
        yield from executor.labelled_tensors()
