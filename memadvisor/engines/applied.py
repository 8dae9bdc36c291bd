"""A plan in force: what the script builds and calls is met by the hooks, checked against the plan, and executed.

Whatever cannot be done rightly raises PlanError before the first update.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from memadvisor.engines import ddp as ddp_patch
from memadvisor.engines import removal
from memadvisor.engines.activations.compressed_activations import CompressedActivations
from memadvisor.engines.activations.offloaded_activations import OffloadedActivations
from memadvisor.engines.activations.recompute import Note, Recompute
from memadvisor.engines.alone import check_steps, check_uncompiled, executor_of_one
from memadvisor.engines.autocast_calls import AutocastCalls
from memadvisor.engines.fsdp2 import Fsdp2, attach, is_for_fsdp2, is_fsdp2_in_use
from memadvisor.engines.losses.chunked_losses import ChunkedLosses
from memadvisor.engines.notes import (
    note_on_owners,
    notes_on,
    touched_activations,
    warnings_of,
    without_effect,
)
from memadvisor.engines.script.heap import keep_freed_memory
from memadvisor.engines.script.hooks import Hooks
from memadvisor.engines.script.live import LiveModel, check_shardable
from memadvisor.engines.script.new_optimizers import NewOptimizers
from memadvisor.engines.script.planned import NotPlannedError, PlannedModels, unmet
from memadvisor.engines.script.undo import Undo
from memadvisor.engines.sharding import local_sgd, sources
from memadvisor.engines.sharding.casts import Casts, check_castable
from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.flat import Flat, Label, Labelled, Slot, flats_with
from memadvisor.engines.sharding.goodbye import patch_goodbye
from memadvisor.engines.sharding.gradient_hooks import check_outside
from memadvisor.engines.sharding.owners import Owners
from memadvisor.engines.sharding.service import Service
from memadvisor.engines.sharding.sharded_step import Swap, is_elementwise
from memadvisor.engines.sharding.transfers import check_compressible
from memadvisor.engines.updates import norms
from memadvisor.engines.updates.cast_updates import are_cast
from memadvisor.engines.updates.closures import closure_of, with_closure_done
from memadvisor.engines.updates.fused_updates import FusedUpdates
from memadvisor.engines.updates.independence import check_independent
from memadvisor.engines.updates.optimizer_state import OptimizerStates
from memadvisor.engines.updates.state_offload import StateOffload
from memadvisor.engines.updates.whole_step import OwnedSwap, slots_of
from memadvisor.errors import PlanError
from memadvisor.plan import Plan
from memadvisor.run.cut import unwrap
from memadvisor.schedule import Schedule
from memadvisor.units import counted

_numbers = itertools.count()


class Applied:
    """A plan in force, until `remove`."""

    def __init__(self, plan: Plan, label: Label | None, note: Note | None) -> None:
        self.plan = plan
        self._label = label or (lambda tensor, category, unit: None)
        self._note = note or (lambda level, text: None)
        self._undo = Undo()
        self._executors: weakref.WeakSet[Executor] = weakref.WeakSet()
        self._wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._owner: weakref.WeakValueDictionary[int, Executor] = weakref.WeakValueDictionary()
        self._slots: weakref.WeakValueDictionary[int, Slot] = weakref.WeakValueDictionary()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._swaps: weakref.WeakKeyDictionary[torch.optim.Optimizer, Swap | OwnedSwap] = (
            weakref.WeakKeyDictionary()
        )
        # Of optimizers that need whole parameters: one order on all ranks.
        self._optimizer_numbers = itertools.count()
        self._owners: weakref.WeakKeyDictionary[torch.optim.Optimizer, Owners] = weakref.WeakKeyDictionary()
        self._states = OptimizerStates(self.slot_of, self._executor_of, self._owners, self.meet)
        self._planned = PlannedModels(plan)
        self._attached = False
        self._has_wrapped = False
        self._awaits_closure = True
        self._fully_sharded: list[Fsdp2] = []
        self._other_model: PlanError | None = None
        if plan.fused_updates:  # before the hooks, which put pieces into an optimizer's groups
            FusedUpdates(self.slot_of, self._note, self._undo)
        self._losses = (
            None if plan.chunked_loss is None else ChunkedLosses(plan.chunked_loss, self._note, self._undo)
        )
        self._autocast = (
            None if plan.autocast is None else AutocastCalls(plan.autocast, self._note, self._undo)
        )
        self._hooks = Hooks(self, self._undo)
        self._new = NewOptimizers(self._hooks, self._undo)
        self._alone: Executor | None = None  # of a model of one process, which lives as long as it
        self._directory = directory = Path(plan.disk_directory or tempfile.gettempdir())
        self._activations = OffloadedActivations(self._hooks, self._label, self._note, self._undo, directory)
        self.recompute = Recompute(self._hooks, self._label, self._note, self._undo, self._activations)
        self._rounding = CompressedActivations(self._hooks, self._label, self._note, self._undo)
        self._casts = Casts(self._undo)
        self._offload = StateOffload(
            self.slot_of, self._label, self._note, self._undo, directory, self._begin_to_gather
        )
        for text in warnings_of(plan):
            self._note("warning", text)
        if plan.num_ranks > 1:
            ddp_patch.patch(self._wrap, self._undo)
            local_sgd.patch(plan.local_sgd, self._executors, self._undo)
            patch_goodbye(self._executors, self._undo)
        if plan.num_ranks > 1 or self._is_paged:
            norms.patch(self.slot_of, self._undo)
            self._states.patch(self._undo)
            if self._stages() != {0}:
                sources.patch(self._executors, self._undo)

    # ---- what others ask ---------------------------------------------------------------------

    def labelled_tensors(self) -> Iterable[Labelled]:
        """Every buffer of the engine that is alive now: (tensor, category, unit)."""
        yield from self._offload.labelled_tensors()
        for executor in self._executors:
            yield from executor.labelled_tensors()
            yield from ((kept, "communication", "") for kept in executor.reductions.feedback.left_over())

    def slot_of(self, parameter: torch.Tensor) -> Slot | None:
        """The place of a parameter that is updated in shards; None for any other tensor."""
        slot = self._slots.get(id(parameter))
        return slot if slot is not None and slot.parameter is parameter else None

    def remove(self) -> None:
        """Leave training as it was found. With sharded units all ranks call this, and wait for each other."""
        self._offload.bring_back()
        gc.collect()  # else models that the script has dropped may be there on some ranks alone
        for executor in sorted(self._executors, key=lambda executor: executor.number):  # alike on all ranks
            with removal.lost_is_told(executor, self._note):
                self._remove(executor)
        self._executors.clear()
        self._alone = None
        wrappers = list(self._wrappers)
        self._undo.run()
        for wrapper in wrappers:
            ddp_patch.restore_reducer(wrapper)

    def when_removed(self, step: Callable[[], None]) -> None:
        self._undo.add(step)

    # ---- meeting the script's objects --------------------------------------------------------

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is named, or seen for the first time. Raises PlanError for a wrong one."""
        is_new = optimizer not in self._optimizers
        if is_new and self._is_paged:
            check_steps(optimizer)
        elif is_new and max(self._stages(), default=0) >= 1 and not is_elementwise(optimizer):
            if self.plan.precision.has_masters:
                raise PlanError(
                    f"{type(optimizer).__name__} needs whole parameters, whose masters are in pieces.",
                    hint="leave out the plan's optimizer_dtype (--optimizer-dtype).",
                )
            calls_once = check_independent(optimizer)
            self._owners[optimizer] = Owners(optimizer, next(self._optimizer_numbers), calls_once)
        self._optimizers.add(optimizer)
        self._states.tell_apart(optimizer)

    def take_over(self, model: torch.nn.Module) -> None:
        """Replace the Reducer of a DDP that exists already."""
        if not isinstance(model, DistributedDataParallel):
            raise PlanError(
                f"The plan is for {counted(self.plan.num_ranks, 'rank')}, and the model is not wrapped in DDP.",
                hint="wrap it in torch.nn.parallel.DistributedDataParallel first.",
            )
        reducer = model.reducer
        if ddp_patch.replace_reducer(model, self._wrap, model.static_graph):
            reducer._remove_autograd_hooks()

    @property
    def is_attached(self) -> bool:
        """Whether a model follows the plan."""
        return self._attached

    def require_attached(self) -> None:
        """Raise PlanError when no model follows the plan."""
        if self._attached:
            return
        raise self._other_model or unmet(self.plan)

    def unknown_module(self, module: torch.nn.Module) -> None:
        """The outermost call of a module that no executor knows: perhaps a model without DDP."""
        for sharded in self._fully_sharded:
            sharded.follow(torch.is_grad_enabled())
        root, is_done = unwrap(module), self._attached and self._planned.is_complete
        if not torch.is_grad_enabled() or (is_done and not self._planned.is_further(root, self._new)):
            return
        if self.plan.num_ranks > 1 and is_for_fsdp2(self.plan, root):
            model, schedule, sharded = attach(
                self.plan,
                self._planned.read(root)[0],
                lambda: next(_numbers),
                self._label,
                self._note,
                self._undo,
            )
            self._fully_sharded.append(sharded)
            self._attach_recompute(model, schedule, is_compiled=root is not module)
            return
        if max(self._stages(), default=0) > 0 and not self._is_paged:
            return
        if not self._planned.may_be_due(root):
            return
        if self.plan.num_ranks > 1 and ddp_patch.has_ddp(module):
            return
        try:
            model, schedule = self._planned.read(self._planned.owner_of(root))
            is_compiled = root is not module and not ddp_patch.has_ddp(module)
            self._attach_recompute(model, schedule, is_compiled=is_compiled)
        except PlanError as error:
            if self.plan.models and not isinstance(error, NotPlannedError):
                raise
            self._other_model = error.with_traceback(None)  # perhaps the next model's; frames hold tensors

    def _stages(self) -> set[int]:
        """ZeRO stages that the plan asks of any unit; on one rank that of units that lie elsewhere alone matters."""
        if self.plan.num_ranks == 1:
            return {3} if self._is_paged else {0}
        return {self.plan.zero_stage, *(unit.zero_stage for unit in self.plan.units)}

    def _leaves_update_alone(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the plan can begin inside a step, in its closure. Pieces of parameters are the script's own under FSDP2 alone."""
        is_left = self.plan.leaves_updates_alone or not (self._is_paged or is_elementwise(optimizer))
        return is_fsdp2_in_use() if self.plan.num_ranks > 1 and self._stages() != {0} else is_left

    @property
    def _is_paged(self) -> bool:
        """Whether parameters lie on another tier between their uses, on one rank."""
        return self.plan.parameter_tiers != {"device"}

    def _attach_recompute(self, model: LiveModel, schedule: Schedule, *, is_compiled: bool) -> None:
        if is_compiled and (what := touched_activations(schedule) or "A loss in chunks" * bool(self._losses)):
            raise PlanError(
                f"{what} cannot be applied to a model compiled by torch.compile.",
                hint="run without torch.compile.",
            )
        if self._is_paged:
            check_uncompiled(is_compiled)
            self._alone = executor_of_one(
                model, schedule, self._hooks, self._label, self._note, self._states.state_of, self._directory
            )
            self._follow(self._alone)
        self._attach_others(model, schedule)
        if self.plan.num_ranks == 1 and not self._is_paged and self._planned.is_complete:
            # There is nothing to do at a module's call, and no other model to meet before an optimizer is made.
            self._new.wait()

    def _wrap(self, wrapper: DistributedDataParallel, any_order: bool) -> Executor | None:
        num_ranks = wrapper.process_group.size()
        if self.plan.executor == "fsdp2":
            raise PlanError(
                "The plan is for a script that calls fully_shard, and this one uses DistributedDataParallel.",
                hint="profile this script and make its plan with `memadvisor advise`.",
            )
        if num_ranks != self.plan.num_ranks:
            ddp_patch.check_spans(num_ranks, self.plan.num_ranks)
            raise PlanError(
                f"The plan is for {counted(self.plan.num_ranks, 'rank')}, and the script's DDP has {num_ranks}.",
                hint=f"start {counted(self.plan.num_ranks, 'rank')}, or advise again with --gpus {num_ranks}.",
            )
        self._give_back(unwrap(wrapper))
        model, schedule = self._planned.read(unwrap(wrapper))
        check_castable(model.root, schedule.precision)
        check_compressible(wrapper.process_group, model.root, schedule.compression)
        check_shardable(wrapper.module, max(unit.zero_stage for unit in schedule.units))
        # The same on every rank, and never used twice: keys of the store bear it.
        number = next(_numbers)
        removal.bring_back_orphans(self._executors, wrapper.process_group, is_first=not self._has_wrapped)
        self._has_wrapped = True
        executor = Executor(
            model,
            schedule,
            wrapper,
            self._hooks,
            self._label,
            any_order,
            lambda made: Service(made, number, self._states.state_of, self._states.owned_state),
            number,
            self._note,
        )
        self._wrappers.add(wrapper)
        if executor.num_shared_stages:
            keep_freed_memory({flat.device for flat in executor.flats}, model.parameter_bytes, self._undo)
        self._casts.attach(model.root, executor.units.values())
        self._follow(executor)
        self._attach_others(model, schedule)
        return executor

    def _give_back(self, root: torch.nn.Module) -> None:
        """A model that the script wraps anew is the script's own again first, on all ranks."""
        for executor in removal.executors_on(root, self._executors):
            ddp_patch.retire(self._wrappers, executor)
            self._remove(executor)
            self._executors.discard(executor)
            self._planned.expect_again(root)
            self._optimizers -= removal.optimizers_of(root, self._optimizers)  # their states are whole now

    def _remove(self, executor: Executor) -> None:
        removal.remove_executor(executor, list(self._optimizers), self.slot_of, self._owners, self._states)

    def _follow(self, executor: Executor) -> None:
        """An executor has taken a model over."""
        for slot in executor.slots:
            if slot.flat.stage >= 1 and slot.flat.trainable:
                self._slots[id(slot.parameter)] = slot
            self._owner[id(slot.flat)] = executor
        self._executors.add(executor)
        for level, text in notes_on(executor):
            self._note(level, text)

    def _attach_others(self, model: LiveModel, schedule: Schedule) -> None:
        for part in (self.recompute, self._offload, self._activations, self._rounding):
            part.attach(model, schedule)
        if self._losses is not None:
            self._losses.attach(model, schedule)
        if self._autocast is not None:
            self._autocast.attach(model)
        for text in without_effect(self.plan, schedule, type(model.root).__name__):
            self._note("warning", text)
        self._attached = True

    # ---- the optimizer step ------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        done = None
        if not self._attached and self._awaits_closure and closure_of(args, kwargs) is not None:
            self._awaits_closure = False
            if self._leaves_update_alone(optimizer):
                return None  # the model is first called inside this step
            done = args, kwargs = with_closure_done(optimizer, None, args, kwargs)  # or in here
        self.require_attached()
        self._planned.refuse_strangers(optimizer)
        slots = slots_of(optimizer, self.slot_of)
        is_offloaded = self._offload.applies(optimizer)
        if not slots and not is_offloaded:
            return done
        check_outside(optimizer, slots)
        self.meet(optimizer)
        self._restore(optimizer)
        owners = self._owners.get(optimizer)
        args, kwargs = with_closure_done(optimizer, owners, args, kwargs)
        for executor in self._executors_of(flats_with(slots)):
            executor.early.step_begins(optimizer, slots)
            executor.step_begins()
            executor.optimizers.add(optimizer)
        if is_offloaded or are_cast(slots):
            self._swaps[optimizer] = self._offload.update(optimizer)
        elif owners is None:
            self._swaps[optimizer] = Swap(optimizer, self.slot_of, label=self._label)
        else:
            self._share_out(optimizer, owners, slots)
            self._swaps[optimizer] = OwnedSwap(optimizer, self.slot_of, owners, self._executor_of, self._note)
        return args, kwargs

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        swap = self._swaps.pop(optimizer, None)
        if swap is None:
            return
        swap.finish()
        flats = flats_with(slots_of(optimizer, self.slot_of))
        for executor in self._executors_of(flats):
            executor.step_ends(flats)

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        swap = self._swaps.pop(optimizer, None)
        if swap is not None:
            swap.undo()

    def _share_out(self, optimizer: torch.optim.Optimizer, owners: Owners, slots: list[Slot]) -> None:
        if owners.assign(slots):
            self._note("info", note_on_owners(optimizer, owners, self.plan.group_ranks))

    def _begin_to_gather(self, flat: Flat) -> None:
        self._executor_of(flat).updated(flat)

    def _executor_of(self, flat: Flat) -> Executor:
        return self._owner[id(flat)]

    def _executors_of(self, flats: Iterable[Flat]) -> list[Executor]:
        owners = {id(owner): owner for flat in flats if (owner := self._owner.get(id(flat))) is not None}
        return list(owners.values())
