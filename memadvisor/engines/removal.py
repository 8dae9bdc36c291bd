"""Taking an executor off a live model: whole parameters, gradients and optimizer state on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from memadvisor.engines.sharding.executor import Executor
from memadvisor.engines.sharding.flat import Flat, Note, Slot
from memadvisor.engines.sharding.owners import Owners
from memadvisor.engines.sharding.released import show
from memadvisor.engines.sharding.replaced import is_elsewhere
from memadvisor.engines.sharding.sharded_step import whole_state
from memadvisor.engines.updates.optimizer_state import OptimizerStates
from memadvisor.engines.updates.whole_step import slots_of


def remove_executor(
    executor: Executor,
    optimizers: Iterable[torch.optim.Optimizer],
    slot_of: Callable[[torch.Tensor], Slot | None],
    owners: Mapping[torch.optim.Optimizer, Owners],
    states: OptimizerStates,
) -> None:
    """Give every tensor back to the script, whole and in storage of its own. All ranks take part.

    owners: of the optimizers that step on whole parameters; `states` gets other ranks'.
    """
    executor.early.end()
    executor.reductions.local_steps.end()
    with torch.no_grad():
        if executor.num_shared_stages:
            executor.sharded.meet()
        executor.reductions.let_go()  # as an evaluation of one rank alone has done: else the others would gather shards of gradients
        executor.loans.end()
        executor.lates.keep_masters()
        _restore_optimizers(executor, optimizers, slot_of, owners, states)
        for flat in executor.flats:
            _restore_parameters(executor, flat)
            _restore_gradients(executor, flat)
        executor.lates.replace(partial(_restored, executor))
    executor.detach()


@contextlib.contextmanager
def lost_is_told(executor: Executor, note: Note) -> Iterator[None]:
    """On one rank, what another tier does not give back when the engine is taken off is lost, and said."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not executor.sharded.is_alone:
            raise
        note("warning", f"not all parameters and states are there again: {error}")
        executor.detach()


def executors_on(root: torch.nn.Module, executors: Iterable[Executor]) -> list[Executor]:
    """Those that a model's parameters follow, in order of their construction, alike on all ranks."""
    own = {id(parameter) for parameter in root.parameters()}
    found = [each for each in executors if any(id(slot.parameter) in own for slot in each.slots)]
    return sorted(found, key=lambda executor: executor.number)


def optimizers_of(
    root: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> set[torch.optim.Optimizer]:
    """Those that update a parameter of a model."""
    own = {id(parameter) for parameter in root.parameters()}
    return {
        optimizer
        for optimizer in optimizers
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    }


def bring_back_orphans(executors: Iterable[Executor], group: dist.ProcessGroup, *, is_first: bool) -> None:
    """Another model is wrapped: bring what the script has of models whose wrapper it has dropped, while all ranks answer.

    The models themselves stay, since the script may use them without a wrapper. is_first: there has been none yet, on any
    rank.
    """
    for executor in [executor for executor in executors if executor.is_orphan]:
        executor.lates.keep()
    if not is_first:
        dist.barrier(group=group)


def _as_without_us(
    executor: Executor, name_of: Callable[[str], str], slot: Slot, key: str, own: torch.Tensor
) -> torch.Tensor:
    whole = executor.service.fetch_state(slot, name_of(key), own)
    return whole.to(slot.flat.script_dtype) if slot.flat.has_masters else whole


def _restored(executor: Executor, slot: Slot, key: str) -> torch.Tensor:
    whole = executor.service.state_of(slot, key) if key else slot.parameter.detach()
    if whole is None:
        raise RuntimeError(f"the state {key!r} of {slot.name!r} has been dropped")
    return whole


def _restore_parameters(executor: Executor, flat: Flat) -> None:
    if flat.full is None:
        return
    full = flat.full
    if flat.is_rounded and flat.stage == 3:  # what modules compute with is not all that the shards hold
        executor.loans.fill(flat, full := flat.new(flat.padded_numel, flat.script_dtype), collective=True)
    else:
        executor.gathers.gather(flat, collective=True)
    for slot in flat.slots:
        if is_elsewhere(slot):
            continue  # the script has put it there
        show(slot, full)
        own = torch.empty_strided(slot.shape, slot.stride, dtype=flat.script_dtype, device=flat.device)
        slot.parameter.data = own.copy_(slot.view(full))
    flat.full = flat.shard = None


def _restore_gradients(executor: Executor, flat: Flat) -> None:
    source = flat.grad
    if (own := flat.grad_shard) is not None:
        source = flat.new(flat.padded_numel)
        executor.sharded.wire.gather(source, own, flat.unit, flat.index)
    for slot in flat.slots:
        if source is not None and slot.parameter.grad is not None:
            slot.parameter.grad = slot.view(source).to(slot.parameter.dtype, copy=True)
        elif slot.token is not None:
            slot.parameter.grad = None  # used up by an update in the backward
        if flat.has_cast_gradients:
            slot.parameter.grad_dtype = flat.script_dtype
    flat.grad = flat.grad_shard = None
    if flat.page is not None:
        flat.page.close()
        flat.page = None


def _restore_optimizers(
    executor: Executor,
    optimizers: Iterable[torch.optim.Optimizer],
    slot_of: Callable[[torch.Tensor], Slot | None],
    owners: Mapping[torch.optim.Optimizer, Owners],
    states: OptimizerStates,
) -> None:
    if executor.num_shared_stages == 0:
        return
    mine = {id(slot) for slot in executor.slots}
    whole: list[tuple[torch.optim.Optimizer, torch.Tensor, Any]] = []
    for optimizer in optimizers:
        of_rank = owners.get(optimizer)
        for slot in slots_of(optimizer, slot_of):
            if id(slot) not in mine:
                continue
            state = optimizer.state.get(slot.parameter)
            if of_rank is not None:
                state = states.from_owner(slot, of_rank) if of_rank.is_elsewhere(slot) else state
            elif state is not None:
                state = whole_state(
                    state, slot, partial(_as_without_us, executor, partial(states.name_of, optimizer))
                )
            if state is not None:
                whole.append((optimizer, slot.parameter, state))
    # Nobody may replace a piece before everybody has read it.
    _wait_for_others(executor)
    for changed, parameter, state in whole:
        changed.state.pop(parameter, None)  # in the order of the groups, as it is without a plan
        changed.state[parameter] = state
    _wait_for_others(executor)


def _wait_for_others(executor: Executor) -> None:
    if not executor.sharded.is_alone:
        dist.barrier(group=executor.sharded.wire.group)
