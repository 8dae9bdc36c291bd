"""What the engine itself takes of the thread that computes while it plays a schedule, as calibrate has measured it.

A few kinds of work, each so long and so often (hardware.EngineCost): a gradient that comes, a collective that is begun, a
parameter whose piece is updated, or that is gathered and released. A parameter is one tensor, however large: what copies
take by the byte is in the backward that was recorded under DDP, which copies gradients into buckets. Without figures
nothing is added. One process whose parameters lie on another tier has figures of its own (hardware.PagingCost). FSDP2 as
executor has work of its own, which was recorded with the script.
"""

from __future__ import annotations

from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.cost.update_shares import UnchangedUpdates, UpdateShares
from memadvisor.schedule import Action, ActionKind, Lane, Schedule

_MEETING_BYTES = 16  # of the message in which all ranks meet
# What an optimizer takes for another unit by itself, beside its arithmetic (docs/engines/measured.md, "Updates of single
# units"): Python alone, and on a GPU launches of kernels that are too small for it.
UNIT_UPDATE_S = {"cpu": 6e-5, "cuda": 1.5e-4}


class EngineTime:
    """Seconds of compute by what is done."""

    def __init__(self, step: CapturedStep, schedule: Schedule, times: CollectiveTimes | None) -> None:
        is_ours = schedule.num_ranks > 1 and schedule.executor == "built-in" and times is not None
        self._cost = times.engine if is_ours and times is not None else None
        self._times, self._schedule = times, schedule
        self._stages = {unit.name: unit.stage_on(schedule.num_ranks) for unit in schedule.units}
        self._num_trainable = {
            name: sum(parameter.requires_grad for parameter in states.parameters)
            for name, states in step.states.items()
        }
        self._num_parameters = {name: len(states.parameters) for name, states in step.states.items()}
        self.is_known = self._cost is not None

    def gradients_s(self, unit: str) -> float:
        """For a unit's gradients, when its backward is over."""
        return 0.0 if self._cost is None else self._cost.gradient_s * self._num_trainable.get(unit, 0)

    def action_s(self, action: Action) -> float:
        """To begin what an action sends, with what other threads take of the core meanwhile; and to show and hide parameters that stage 3 gathers."""
        if self._cost is None or action.lane is not Lane.COLLECTIVE:
            return 0.0
        is_shown = action.kind is ActionKind.GATHER and self._stages.get(action.unit) == 3
        num_shown = self._num_parameters.get(action.unit, 0) if is_shown else 0
        return self._cost.collective_s + self._cost.lane_s + self._cost.shown_s * num_shown

    def pieces_s(self) -> float:
        """In an optimizer step, for what is updated in pieces."""
        if self._cost is None:
            return 0.0
        num_pieces = sum(self._num_trainable.get(name, 0) for name, stage in self._stages.items() if stage)
        return self._cost.piece_s * num_pieces

    def meeting_s(self, stage: int) -> float:
        """For all ranks to meet, where a unit is of this stage or a higher one: before each forward that trains from
        stage 2 on, twice from stage 3 on, and before the optimizer step from stage 1 on."""
        if self._cost is None or self._times is None or max(self._stages.values(), default=0) < stage:
            return 0.0
        return self._times.seconds("all_reduce", _MEETING_BYTES, self._schedule.num_ranks)


class PagingTime:
    """The same of one process, of units whose parameters and gradients lie on another tier."""

    def __init__(self, step: CapturedStep, schedule: Schedule, times: TransferTimes | None) -> None:
        self._cost = times.paging if times is not None and schedule.num_ranks == 1 else None
        self._parameters = {
            name: step.states[name].parameters for name in schedule.paged if name in step.states
        }

    def gather_s(self, unit: str) -> float:
        """To have a unit's parameters read, and to put them in their place and out of it."""
        if self._cost is None:
            return 0.0
        return self._cost.transfer_s + self._cost.shown_s * len(self._parameters.get(unit, ()))

    def transfer_s(self) -> float:
        """To have a gradient written, or read to be added to."""
        return 0.0 if self._cost is None else self._cost.transfer_s

    def update_s(self, unit: str) -> float:
        """To have what a unit's update needs read, and written, and to update it by itself."""
        if self._cost is None or unit not in self._parameters:
            return 0.0
        num_updated = sum(parameter.requires_grad for parameter in self._parameters.get(unit, ()))
        return 3 * self._cost.transfer_s + self._cost.update_s * num_updated

    def whole_update_s(self, optimizer_s: float, shares: UpdateShares | UnchangedUpdates, unit: str) -> float:
        """With its share of what the optimizer takes for all."""
        return optimizer_s * shares.time((unit,)) + self.update_s(unit)
