"""The executor: plays a schedule on one live model, at the boundaries of its units.

Forward boundaries come from global module hooks, backward ones from hooks on output tensors and from
gradients that have been accumulated. docs/engines/sharding.md says which buffers exist when, and docs/engines/internals.md
of which parts an executor is made: it alone knows them all, and hands each those below it.

Two kinds of reading a stage-3 parameter: in a training pass through DDP all ranks gather together; in
any other (evaluation, a pass on one rank, a look at a parameter) a rank asks the others' service
threads (service.py), so that nobody has to take part who does not know of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.sharding.arrivals import Arrivals
from memadvisor.engines.sharding.early_updates import EarlyUpdates
from memadvisor.engines.sharding.flat import Flat, Label, Labelled, Note, UnitState
from memadvisor.engines.sharding.gathers import Gathers
from memadvisor.engines.sharding.gradients import GradientShards
from memadvisor.engines.sharding.loans import Loans
from memadvisor.engines.sharding.masters import take_written
from memadvisor.engines.sharding.moving import move_parameters
from memadvisor.engines.sharding.reductions import Reductions
from memadvisor.engines.sharding.released import release
from memadvisor.engines.sharding.saved import SavedParameters
from memadvisor.engines.sharding.service import AnyService
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.engines.sharding.sources import Lates
from memadvisor.errors import PlanError
from memadvisor.run.cut import innermost, unwrap
from memadvisor.schedule import Action, ActionKind, Point, Ranks, Schedule


class Executor:
    """Plays `schedule` on `model`, whose DDP wrapper is `ddp`. Kept alive by that wrapper alone.

    ddp: None for a model of one process, whose parameters lie elsewhere; `pages` then says where (one_process.py).
    """

    def __init__(
        self,
        model: LiveModel,
        schedule: Schedule,
        ddp: Any,
        hooks: Hooks,
        label: Label,
        any_order: bool,
        service: Callable[[ShardedModel], AnyService],
        number: int = 0,
        note: Note = lambda level, text: None,
        pages: Callable[[ShardedModel], None] = lambda sharded: None,
    ) -> None:
        self.sharded = sharded = ShardedModel(
            model, schedule, ddp, hooks, label, note, any_order=any_order, number=number
        )
        self._schedule = schedule
        self._hooks = hooks
        self._uses = model.uses
        self._entered: list[str] = []  # units of stage 3 whose calls are under way, the innermost last
        self.number = number
        self.units = sharded.units
        self.flats = sharded.flats
        self.slots = sharded.slots
        self.num_shared_stages = sharded.num_shared_stages
        # The model, and what torch.compile has made of it inside DDP: a pass begins and ends with one of them.
        modules = () if ddp is None else ddp.module.modules()
        self.tops = {id(m) for m in (model.root, *modules) if unwrap(m) is model.root}
        self._ddp: Callable[[], Any] = (lambda: None) if ddp is None else weakref.ref(ddp)
        self.optimizers: set[torch.optim.Optimizer] = set()  # their state is asked for as long as we are
        this: Executor = weakref.proxy(self)
        # Each part is handed those below it.
        self.service = service(sharded)
        self.arrivals = Arrivals(sharded, lambda: this.observe_modules())
        self.early = EarlyUpdates(sharded, self.arrivals)
        self.loans = Loans(sharded, self.service, self.early)
        self.lates = Lates(sharded, self.service, self.early, self.loans, weakref.ref(self))
        self.gathers = Gathers(sharded, self.service, self.early, self.loans)
        self.gradient_shards = GradientShards(sharded, self.service, self.early)
        self.reductions = Reductions(sharded, self.early, this)
        pages(sharded)
        move_parameters(sharded, self.lates, self.gradient_shards)
        # Not sooner: a rank that is ahead may ask for a shard before this one has any.
        self.service.open(self)
        self._attach()

    # ---- construction ------------------------------------------------------------------------

    @property
    def needs_units(self) -> bool:
        """Whether units have boundaries at which something must be done."""
        return self.num_shared_stages == 3

    @property
    def is_orphan(self) -> bool:
        """Whether the script has let go of its DDP wrapper."""
        return not self.sharded.is_alone and self._ddp() is None

    def _attach(self) -> None:
        self._hooks.observe(self, self.tops)
        if self.num_shared_stages == 3:
            self.observe_modules()

    def observe_modules(self) -> None:
        self._hooks.observe(self, set(self._uses))

    def detach(self) -> None:
        self._hooks.forget(self)
        self.reductions.detach()
        self.sharded.wire.close()
        self.sharded.transfers.close()
        self.service.stop()

    # ---- forward -----------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module) -> None:
        if id(module) in self.tops and not self._hooks.in_backward:
            self._pass_begins()
        names = self._units_of(module)
        is_lent = self._is_lent(names)
        for name in names:
            unit = self.units[name]
            if unit.stage == 3:
                unit.depth += 1
                if unit.depth == 1:
                    self._entered.append(name)
                    self._play(Point.BEFORE_FORWARD, unit, is_lent=is_lent)
                unit.pushes.append(SavedParameters.push(self.gathers) if torch.is_grad_enabled() else 0)
            elif any(flat.arriving is not None for flat in unit.flats):
                self._play(Point.BEFORE_FORWARD, unit)

    def leave_module(self, module: torch.nn.Module, output: Any) -> None:
        names = self._units_of(module)
        for name in reversed(names):
            unit = self.units[name]
            if unit.stage != 3 or unit.depth == 0:
                continue
            unit.depth -= 1
            if unit.depth == 0:
                self._entered.remove(name)
            if unit.pushes and unit.pushes.pop():  # nothing was pushed where the unit could not be gathered
                SavedParameters.pop()
            if unit.depth == 0 and not self._hooks.in_backward:
                # A pass inside the backward recomputes; its parameters are needed again at once.
                self._mark_backward(unit, output, is_lent=self._is_lent(names))
                self._play(Point.AFTER_FORWARD, unit)
        if id(module) in self.tops and not self._hooks.in_backward:
            self._pass_ends()

    def _units_of(self, module: torch.nn.Module) -> Sequence[str]:
        """Units of which a call of the module is one. Where torch.func transforms it no unit of stage 3 is brought in or freed:
        its functions have tensors of their own in the place of parameters, and what reads one itself is lent it."""
        names = self._uses.get(id(module), ())
        if names and torch._C._functorch.peek_interpreter_stack() is not None:
            return [name for name in names if self.units[name].stage < 3]
        return names

    def _is_lent(self, names: Collection[str]) -> bool:
        """Whether a module that needs these units is called by another unit, which holds it too: not by one around them."""
        caller = self._entered[-1:]
        return bool(caller) and all(innermost(name, caller) is None for name in names)

    def _pass_begins(self) -> None:
        self.early.pass_begins()
        self.gathers.drop_begun()  # of a pass that an exception ended
        sharded, ddp = self.sharded, self._ddp()
        through_ddp = sharded.is_alone or (ddp is not None and type(ddp)._active_ddp_module is ddp)
        # Alone, nobody is left out of a pass.
        training = torch.is_grad_enabled() and (sharded.is_alone or sharded.live.root.training)
        if through_ddp and training and self.num_shared_stages == 3:
            self.gathers.meet()
            self.loans.end()
            self._release_all()  # on all ranks, or one would wait for gathers that another leaves out
        self.reductions.sweep(together=through_ddp and training)
        sharded.collective = through_ddp and training and not sharded.any_order
        sharded.asks = (
            through_ddp and training and sharded.any_order and self.service.can_send(self.flats[0].device)
        )
        if torch.is_grad_enabled() and (sharded.is_alone or ddp is not None):
            self.reductions.expect(through_ddp, sharded.is_alone or ddp.require_backward_grad_sync)
        sharded.in_forward = True

    def _pass_ends(self) -> None:
        """What the schedule has not released is kept for the backward of a pass that all ranks took."""
        sharded = self.sharded
        sharded.in_forward = False
        self.gathers.drop_begun()
        for unit in self.units.values():
            unit.is_kept |= (sharded.collective or sharded.asks) and unit.stage == 3 and unit.present
        self._release_all(kept=False)
        sharded.collective = sharded.asks = False

    def _release_all(self, *, kept: bool = True) -> None:
        """Release every unit of stage 3; without `kept`, those alone that this rank may release by itself."""
        for unit in self.units.values():
            if unit.stage == 3 and (kept or not unit.is_kept):
                self._release_unit(unit)
                unit.is_kept = False
                if kept:
                    unit.drop_second()

    def _mark_backward(self, unit: UnitState, output: Any, *, is_lent: bool) -> None:
        """Have the unit's backward announced by the gradients of its outputs."""
        if not torch.is_grad_enabled():
            return
        this, collective, asks = weakref.ref(self), self.sharded.collective, self.sharded.asks

        def announced(gradient: torch.Tensor) -> None:
            executor = this()
            if executor is not None:
                sharded = executor.sharded
                sharded.collective, sharded.asks = collective, asks
                executor._unit_backward_begins(unit, is_lent=is_lent)

        leaves: list[Any] = tree_leaves(output)
        for tensor in leaves:
            if issubclass(type(tensor), torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(announced)

    # ---- backward ----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        self.reductions.begin()

    def _unit_backward_begins(self, unit: UnitState, *, is_lent: bool) -> None:
        if not self._hooks.in_backward or unit.has_come:
            # An output that a unit is given and hands on (T5's position bias) has its gradient only when all whom it went
            # through are done with it: their parameters would come back, and stay until the backward ends.
            return
        if unit.stage == 3 and self._hooks.makes_graph:
            # What this backward keeps of parameters for the next one, which nothing announces, would be gone then.
            raise PlanError(
                "The script asks for a derivative that it differentiates once more (create_graph=True), for which ZeRO stage 3 "
                "does not have the parameters.",
                hint="use --zero 2, which keeps whole parameters.",
            )
        for other in self.units.values():
            # Units without gradients of their own have no other sign that their backward is over.
            if other is not unit and other.stage == 3 and other.is_frozen_and_done:
                self._release_unit(other)
        unit.in_backward = True
        self._play(Point.BEFORE_BACKWARD, unit, is_lent=is_lent)

    def unit_backward_ends(self, unit: UnitState) -> None:
        """All gradients of the unit are there; its reduction follows when its turn has come."""
        if unit.stage == 3:
            self._play(Point.AFTER_BACKWARD, unit, ActionKind.RELEASE)

    def reduce_unit(self, unit: UnitState) -> None:
        self._play(Point.AFTER_BACKWARD, unit, ActionKind.REDUCE)
        self._play(Point.AFTER_BACKWARD, unit, ActionKind.UPDATE)

    def backward_ends(self, failed: bool) -> None:
        is_ours = self.reductions.end(failed)
        self.sharded.num_backwards += is_ours
        self.gathers.drop_begun()
        self._release_all(kept=is_ours)
        self.sharded.collective = self.sharded.asks = False

    # ---- actions -----------------------------------------------------------------------------

    def _play(
        self, point: Point, unit: UnitState, only: ActionKind | None = None, *, is_lent: bool = False
    ) -> None:
        """`is_lent`: another unit calls a module of it."""
        self.sharded.unit = unit.name
        # What follows a forward that the backward runs again is the unit before; and what follows one whose unit is there
        # from an earlier call in this pass (its parameters are tied) has had its turn; behind a layer that is lent it has its own.
        is_again = self._hooks.in_backward or (unit.stage == 3 and unit.present)
        for action in self._schedule.at(point, unit.name):
            if only is not None and action.kind is not only:
                continue
            if action.overlaps and (is_lent or (point is Point.BEFORE_FORWARD and is_again)):
                continue
            if action.kind is ActionKind.GATHER:
                self._gather_unit(action)
            elif action.kind is ActionKind.RELEASE:
                self._release_unit(
                    unit, leaves_second=action.ranks is Ranks.SECONDARY and self.sharded.collective
                )
            elif action.kind is ActionKind.REDUCE:
                self.reductions.reduce(unit, action)
            elif action.kind is ActionKind.UPDATE:
                self.early.update(unit)
            # RECOMPUTE is played by recompute.py, which wraps the unit's own forward.

    def _gather_unit(self, action: Action) -> None:
        sharded = self.sharded
        for flat in self.units[action.unit].flats:
            if not action.overlaps:
                self.gathers.gather(flat)
            elif sharded.asks or (
                sharded.collective and (flat.second is not None or action.ranks is not Ranks.SECONDARY)
            ):
                self.gathers.begin(flat)  # nobody is asked for what may never be needed

    def _release_unit(self, unit: UnitState, *, leaves_second: bool = False) -> None:
        if unit.depth == 0 or self._hooks.in_backward:
            unit.in_backward = False
            may_be_written = unit.is_kept or _has_hooks(unit.live.module)
            for flat in unit.flats:
                if leaves_second:
                    self.sharded.transfers.keep_second(flat)
                release(flat, self.lates, may_be_written=may_be_written)

    # ---- the optimizer step ------------------------------------------------------------------

    def step_begins(self) -> None:
        """All ranks meet here, so that none updates what another is still reading."""
        self._release_all()
        self.gathers.wait_for_sent()
        self.arrivals.step_begins()
        found = self.sharded.wire.largest([self.sharded.digest, -self.sharded.digest])
        if found[0] != -found[1]:
            raise RuntimeError("the ranks ran different units of the model in this step")
        self.reductions.step_begins()
        self.loans.end()
        self.lates.forget()
        self.sharded.in_step = True
        take_written(self.flats)

    def updated(self, flat: Flat) -> None:
        """All of a flat has been updated: begin to bring it, while the optimizer step goes on with others."""
        if flat.stage == 3:
            self.gathers.begin_behind_update(flat)
        else:
            self.arrivals.begin(flat)

    def step_ends(self, flats: Iterable[Flat]) -> None:
        """Bring what this optimizer has updated to all ranks."""
        with torch.no_grad():
            self.arrivals.bring({flat.index for flat in flats})
        self.sharded.num_steps += 1
        self.sharded.in_step = (
            False  # after the count: a question about this step may be answered from here on
        )
        self.loans.step_ends()

    def labelled_tensors(self) -> Iterator[Labelled]:
        return ((tensor, category, flat.unit) for flat in self.flats for tensor, category in flat.tensors())


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether the script has any on its modules: what they do runs while parameters are here."""
    return any(
        each._forward_pre_hooks or each._forward_hooks or each._backward_pre_hooks or each._backward_hooks
        for each in module.modules()
    )
