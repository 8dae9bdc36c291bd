"""Local SGD on a live model: which steps reduce nothing, and when parameters become their mean over the ranks.

All ranks average after the same backward (memadvisor/local_sgd.py says after which), when the optimizer has stepped; who
tells of its steps is local_sgd.py. Of several optimizers the last one to step is waited for, of those that have been
seen to step.
"""

from __future__ import annotations

import weakref

import torch

from memadvisor.engines.sharding.flat import UnitState
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.schedule import ActionKind, Point


class LocalSteps:
    """Of one model; without local SGD every step reduces, and there is never anything to average."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._local_sgd = sharded.schedule.local_sgd
        self._num_steps = 0
        self._expects_step = False  # whether the backward to come is one after which DDP would reduce
        self._is_due = False
        self._have_parted = False  # whether ranks have stepped by themselves since parameters were alike
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._waiting: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def expect(self, through_ddp: bool, is_step: bool) -> bool:
        """A forward with gradients begins. Returns whether the backwards that follow it reduce."""
        if through_ddp:
            self.average_if_due()
        self._expects_step = is_step
        is_local = self._local_sgd is not None and self._local_sgd.is_local(self._num_steps)
        return is_step and not is_local

    def backward_ends(self) -> None:
        if self._local_sgd is None or not self._expects_step:
            return
        self._have_parted |= self._local_sgd.is_local(self._num_steps)
        self._num_steps += 1
        if self._local_sgd.is_averaged_after(self._num_steps):
            self._is_due = True
            self._waiting = weakref.WeakSet(self._optimizers)

    def optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, or left out a step."""
        if optimizer not in self._optimizers:
            ours = {id(slot.parameter) for slot in self._sharded.slots}
            if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                return
            self._optimizers.add(optimizer)
        self._waiting.discard(optimizer)
        if not self._waiting:
            self.average_if_due()

    def average_if_due(self) -> None:
        if self._is_due:
            self._average()

    def end(self) -> None:
        """The engine is taken off: DDP takes ranks to be alike."""
        if self._have_parted:
            self._average()

    def _average(self) -> None:
        self._is_due = self._have_parted = False
        self._waiting.clear()
        with torch.no_grad():
            for action in self._sharded.schedule.at(Point.AFTER_OPTIMIZER):
                if action.kind is ActionKind.AVERAGE:
                    self._average_unit(self._sharded.units[action.unit])

    def _average_unit(self, unit: UnitState) -> None:
        wire = self._sharded.wire
        self._sharded.unit = unit.name
        under_way = []
        for flat in unit.trainable:
            staging = wire.stage(flat.num_elements, flat.dtype, flat.device)
            for slot in flat.slots:
                slot.view(staging).copy_(slot.parameter)
            under_way.append((flat, staging, wire.begin_mean(staging, unit.name)))
        for flat, staging, transfer in under_way:
            transfer.wait()
            for slot in flat.slots:
                slot.parameter.copy_(slot.view(staging))
