"""The executor: plays a schedule on one live model, at the boundaries of its units.

Forward boundaries come from global module hooks, backward ones from hooks on output tensors and from
gradients that have been accumulated. docs/engines/sharding.md says which buffers exist when.

Two kinds of reading a stage-3 parameter: in a training pass through DDP all ranks gather together; in
any other (evaluation, a pass on one rank, a look at a parameter) a rank asks the others' service
threads (service.py), so that nobody has to take part who does not know of it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.sharding.arrivals import Arrivals, drop, settle
from memadvisor.engines.sharding.build_units import build_units
from memadvisor.engines.sharding.early_updates import EarlyUpdates, Note
from memadvisor.engines.sharding.flat import Flat, UnitState
from memadvisor.engines.sharding.gradient_hooks import GradientHooks
from memadvisor.engines.sharding.loans import Loans
from memadvisor.engines.sharding.masters import take_written
from memadvisor.engines.sharding.moving import move_parameters
from memadvisor.engines.sharding.one_process import NoService, wire_of
from memadvisor.engines.sharding.reductions import Reductions
from memadvisor.engines.sharding.released import hide, show
from memadvisor.engines.sharding.saved import SavedParameters
from memadvisor.engines.sharding.second_copies import second_copies
from memadvisor.engines.sharding.service import Service
from memadvisor.engines.sharding.sources import Lates
from memadvisor.engines.sharding.transfers import Transfers
from memadvisor.run.cut import unwrap
from memadvisor.schedule import Action, ActionKind, Point, Ranks, Schedule

Label = Callable[[torch.Tensor, str, str], None]
Labelled = tuple[torch.Tensor, str, str]


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
        service: Callable[[Executor], Service | NoService],
        number: int = 0,
        note: Note = lambda level, text: None,
        pages: Callable[[Executor], None] = lambda executor: None,
    ) -> None:
        self.model = model
        # The model, and what torch.compile has made of it inside DDP: a pass begins and ends with one of them.
        modules = () if ddp is None else ddp.module.modules()
        self.tops = {id(m) for m in (model.root, *modules) if unwrap(m) is model.root}
        self.is_alone = ddp is None
        self.number = number  # in order of construction, the same on all ranks
        self.schedule = schedule
        self.hooks = hooks
        self.label = label
        self.unit = ""  # whose staging is being allocated
        self.wire = wire_of(ddp, schedule, number, lambda staged: label(staged, "communication", self.unit))
        self.transfers = Transfers(self.wire, second_copies(schedule, self.wire, number, label))
        self.any_order = any_order  # ranks may use different parameters (find_unused_parameters)
        self.collective = False  # whether the pass under way is one that all ranks take together
        self.asks = False  # whether it is, but in any order, and each rank asks for what it needs
        self.in_forward = False  # the model's own
        self.digest = 0
        # How far this rank has come: what a service thread needs to know before it answers.
        self.num_backwards = 0
        self.num_steps = 0
        self.num_writes = 0
        self.in_step = False
        self._ddp: Callable[[], Any] = (lambda: None) if ddp is None else weakref.ref(ddp)
        self.optimizers: set[torch.optim.Optimizer] = set()  # their state is asked for as long as we are
        self.units = build_units(model, schedule, self.wire.rank, self.wire.num_ranks)
        self.slots = [slot for flat in self.flats for slot in flat.slots]
        for index, slot in enumerate(self.slots):
            slot.index = index
        self.reductions = Reductions(self)
        self.loans = Loans(self)
        self.lates = Lates(self)
        self.arrivals = Arrivals(self)
        self.note = note
        self.early = EarlyUpdates(self, note)
        self.gradient_hooks = GradientHooks(self)
        pages(self)
        move_parameters(self)
        # Not sooner: a rank that is ahead may ask for a shard before this one has any.
        self.service = service(self)
        self._attach()

    # ---- construction ------------------------------------------------------------------------

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units.values() for flat in unit.flats]

    @property
    def needs_units(self) -> bool:
        """Whether units have boundaries at which something must be done."""
        return self.num_shared_stages == 3

    @property
    def is_orphan(self) -> bool:
        """Whether the script has let go of its DDP wrapper."""
        return not self.is_alone and self._ddp() is None

    @property
    def num_shared_stages(self) -> int:
        """The highest stage of any unit."""
        return max((unit.stage for unit in self.units.values()), default=0)

    def _attach(self) -> None:
        self.hooks.observe(self, self.tops)
        if self.num_shared_stages == 3:
            self.observe_modules()

    def observe_modules(self) -> None:
        self.hooks.observe(self, set(self.model.uses))

    def detach(self) -> None:
        self.hooks.forget(self)
        self.gradient_hooks.remove()
        self.wire.close()
        self.transfers.close()
        self.service.stop()

    # ---- forward -----------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module) -> None:
        if id(module) in self.tops and not self.hooks.in_backward:
            self._pass_begins()
        for name in self.model.uses.get(id(module), ()):
            unit = self.units[name]
            if unit.stage == 3:
                unit.depth += 1
                if unit.depth == 1:
                    self._play(Point.BEFORE_FORWARD, unit)
                unit.pushes.append(SavedParameters.push(self) if torch.is_grad_enabled() else 0)
            elif any(flat.arriving is not None for flat in unit.flats):
                self._play(Point.BEFORE_FORWARD, unit)

    def leave_module(self, module: torch.nn.Module, output: Any) -> None:
        for name in reversed(self.model.uses.get(id(module), ())):
            unit = self.units[name]
            if unit.stage != 3 or unit.depth == 0:
                continue
            unit.depth -= 1
            if unit.pushes and unit.pushes.pop():  # nothing was pushed where the unit could not be gathered
                SavedParameters.pop()
            if unit.depth == 0 and not self.hooks.in_backward:
                # A pass inside the backward recomputes; its parameters are needed again at once.
                self._mark_backward(unit, output)
                self._play(Point.AFTER_FORWARD, unit)
        if id(module) in self.tops and not self.hooks.in_backward:
            self._pass_ends()

    @property
    def computes(self) -> bool:
        """Whether who reads a parameter now is the model, which computes with it, and not the script."""
        return self.in_forward or self.hooks.in_backward

    def _pass_begins(self) -> None:
        self.early.pass_begins()
        self._drop_arriving()  # of a pass that an exception ended
        ddp = self._ddp()
        through_ddp = self.is_alone or (ddp is not None and type(ddp)._active_ddp_module is ddp)
        # Alone, nobody is left out of a pass.
        training = torch.is_grad_enabled() and (self.is_alone or self.model.root.training)
        if through_ddp and training and self.num_shared_stages == 3:
            self.meet()
            self.loans.end()
            self._release_all()  # on all ranks, or one would wait for gathers that another leaves out
        self.reductions.sweep(together=through_ddp and training)
        self.collective = through_ddp and training and not self.any_order
        self.asks = (
            through_ddp and training and self.any_order and self.service.can_send(self.flats[0].device)
        )
        if torch.is_grad_enabled() and (self.is_alone or ddp is not None):
            self.reductions.expect(through_ddp, self.is_alone or ddp.require_backward_grad_sync)
        self.in_forward = True

    def _pass_ends(self) -> None:
        """What the schedule has not released is kept for the backward of a pass that all ranks took."""
        self.in_forward = False
        self._drop_arriving()
        for unit in self.units.values():
            unit.is_kept |= (self.collective or self.asks) and unit.stage == 3 and unit.present
        self._release_all(kept=False)
        self.collective = self.asks = False

    def _release_all(self, *, kept: bool = True) -> None:
        """Release every unit of stage 3; without `kept`, those alone that this rank may release by itself."""
        for unit in self.units.values():
            if unit.stage == 3 and (kept or not unit.is_kept):
                unit.is_kept = False
                self._release_unit(unit)
                if kept:
                    unit.drop_second()

    def _mark_backward(self, unit: UnitState, output: Any) -> None:
        """Have the unit's backward announced by the gradients of its outputs."""
        if not torch.is_grad_enabled():
            return
        this, collective, asks = weakref.ref(self), self.collective, self.asks

        def announced(gradient: torch.Tensor) -> None:
            executor = this()
            if executor is not None:
                executor.collective, executor.asks = collective, asks
                executor._unit_backward_begins(unit)

        leaves: list[Any] = tree_leaves(output)
        for tensor in leaves:
            if issubclass(type(tensor), torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(announced)

    # ---- backward ----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        self.reductions.begin()

    def _unit_backward_begins(self, unit: UnitState) -> None:
        if not self.hooks.in_backward or self.reductions.has_come(unit):
            # An output that a unit is given and hands on (T5's position bias) has its gradient only when all whom it went
            # through are done with it: their parameters would come back, and stay until the backward ends.
            return
        for other in self.units.values():
            # Units without gradients of their own have no other sign that their backward is over.
            if other is not unit and other.stage == 3 and other.is_frozen_and_done:
                self._release_unit(other)
        unit.in_backward = True
        self._play(Point.BEFORE_BACKWARD, unit)

    def unit_backward_ends(self, unit: UnitState) -> None:
        """All gradients of the unit are there; its reduction follows when its turn has come."""
        if unit.stage == 3:
            self._play(Point.AFTER_BACKWARD, unit, ActionKind.RELEASE)

    def reduce_unit(self, unit: UnitState) -> None:
        self._play(Point.AFTER_BACKWARD, unit, ActionKind.REDUCE)
        self._play(Point.AFTER_BACKWARD, unit, ActionKind.UPDATE)

    def backward_ends(self, failed: bool) -> None:
        is_ours = self.reductions.end(failed)
        self.num_backwards += is_ours
        self._drop_arriving()
        self._release_all(kept=is_ours)
        self.collective = self.asks = False

    # ---- actions -----------------------------------------------------------------------------

    def _play(self, point: Point, unit: UnitState, only: ActionKind | None = None) -> None:
        self.unit = unit.name
        # What follows a forward that the backward runs again is the unit before; and what follows one whose unit is there
        # from an earlier call in this pass (its parameters are tied) has had its turn.
        is_again = self.hooks.in_backward or (unit.stage == 3 and unit.present)
        for action in self.schedule.at(point, unit.name):
            if only is not None and action.kind is not only:
                continue
            if point is Point.BEFORE_FORWARD and action.overlaps and is_again:
                continue
            if action.kind is ActionKind.GATHER:
                self._gather_unit(action)
            elif action.kind is ActionKind.RELEASE:
                self._release_unit(unit, leaves_second=action.ranks is Ranks.SECONDARY and self.collective)
            elif action.kind is ActionKind.REDUCE:
                self.reductions.reduce(unit, action)
            elif action.kind is ActionKind.UPDATE:
                self.early.update(unit)
            # RECOMPUTE is played by recompute.py, which wraps the unit's own forward.

    def _gather_unit(self, action: Action) -> None:
        for flat in self.units[action.unit].flats:
            if not action.overlaps:
                self.gather(flat)
            elif self.asks or (
                self.collective and (flat.second is not None or action.ranks is not Ranks.SECONDARY)
            ):
                self._begin_gather(flat)  # nobody is asked for what may never be needed

    def _begin_gather(self, flat: Flat) -> None:
        """Have a stage-3 flat come in while others run; its parameters stay hidden until `gather`."""
        if flat.present or flat.arriving is not None or flat.full is None or not flat.has_shard:
            return
        with torch.no_grad():
            self._make_room(flat, flat.full)
            if self.asks:
                flat.arriving = self.service.begin_fetch(flat, flat.full)
                return
            self.remember("gather", flat)
            flat.arriving = self.transfers.begin_gather(flat)

    def _make_room(self, flat: Flat, full: torch.Tensor) -> None:
        full.untyped_storage().resize_(flat.padded_numel * full.itemsize)
        self.label(full, "parameter", flat.unit)

    def gather(self, flat: Flat, collective: bool | None = None) -> None:
        """Make a flat present; nothing happens when it is."""
        if flat.present or flat.full is None or not flat.has_shard:
            return
        if flat.stage < 3:
            settle(flat)
            return
        self.early.read(flat)
        with torch.no_grad():
            if flat.arriving is not None:
                flat.arriving.wait()
                flat.arriving = flat.second = None
            else:
                self._make_room(flat, flat.full)
                if self.collective if collective is None else collective:
                    self.remember("gather", flat)
                    self.transfers.gather(flat)
                else:
                    self.fill(flat, flat.full, collective=False)
            for slot in flat.slots:
                show(slot, flat.full)

    def _drop_arriving(self) -> None:
        """Let go of what was gathered ahead and never asked for, as when the model takes another way."""
        for flat in self.flats:
            drop(flat)

    def fill(self, flat: Flat, full: torch.Tensor, collective: bool) -> None:
        """Write a flat's parameters, from all ranks, into `full`, in every digit that `full` has."""
        if collective:
            self.remember("gather", flat)
            self.wire.gather(full, flat.own_part(full), flat.unit, flat.index)
        elif flat.loan is not None:
            full.copy_(flat.loan)
        elif self.asks:
            self.service.begin_fetch(flat, full).wait()
        else:
            self.service.fetch_parameters(flat, full)

    def _release_unit(self, unit: UnitState, *, leaves_second: bool = False) -> None:
        if unit.depth == 0 or self.hooks.in_backward:
            unit.in_backward = False
            for flat in unit.flats:
                if leaves_second:
                    self.transfers.keep_second(flat)
                self.release(flat)

    def release(self, flat: Flat) -> None:
        """Free a flat's full parameters, and keep what a module has written into them."""
        if flat.full is not None and flat.present:
            if any(slot.is_written for slot in flat.slots):
                flat.keep_written()
            for slot in flat.slots:
                hide(slot, self)
            flat.full.untyped_storage().resize_(0)

    def remember(self, operation: str, flat: Flat) -> None:
        self.digest = zlib.crc32(f"{operation} {flat.index}".encode(), self.digest)

    # ---- the optimizer step ------------------------------------------------------------------

    def step_begins(self) -> None:
        """All ranks meet here, so that none updates what another is still reading."""
        self._release_all()
        self.arrivals.step_begins()
        found = self.wire.largest([self.digest, -self.digest])
        if found[0] != -found[1]:
            raise RuntimeError("the ranks ran different units of the model in this step")
        self.reductions.step_begins()
        self.loans.end()
        self.lates.forget()
        self.in_step = True
        take_written(self.flats)

    def step_ends(self, flats: Iterable[Flat]) -> None:
        """Bring what this optimizer has updated to all ranks."""
        with torch.no_grad():
            self.arrivals.bring({flat.index for flat in flats})
        self.num_steps += 1
        self.in_step = False  # after the count: a question about this step may be answered from here on

    def meet(self) -> None:
        """Wait for all ranks: whatever they read before this point of the program, they have read."""
        self.wire.largest([0])
        self.reductions.have_met()

    def labelled_tensors(self) -> Iterator[Labelled]:
        return ((tensor, category, flat.unit) for flat in self.flats for tensor, category in flat.tensors())
