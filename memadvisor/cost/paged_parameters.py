"""The time of reads of parameters and writes of gradients that lie on another tier, and what waits for them.

A gather on the lane of a tier is a read into the full parameters, ahead of the unit or where it begins; a reduction on it
is a write of the gradient from the buffer that it was made in, which the next one, or the backward's end, waits for. Of
later micro-batches the gradient of those before is read first, and added. memadvisor/engines/sharding/paged_flats.py does so.
"""

from __future__ import annotations

from memadvisor.cost.engine_memory import EngineMemory
from memadvisor.cost.engine_time import PagingTime
from memadvisor.cost.fsdp2_memory import Fsdp2Memory
from memadvisor.cost.lanes import Lanes
from memadvisor.cost.messages import Message
from memadvisor.cost.transfers import TransferTimes
from memadvisor.schedule import Action, ActionKind, Lane

_OF_NO_TIER = frozenset((Lane.COLLECTIVE, Lane.COMPUTE))


class PagedParameters:
    """`engine`: what is held meanwhile. `own`: what the engine itself takes."""

    def __init__(
        self,
        lanes: Lanes,
        times: TransferTimes | None,
        engine: EngineMemory | Fsdp2Memory,
        own: PagingTime,
    ) -> None:
        self._lanes = lanes
        self._times = times
        self._engine = engine
        self._own = own
        self._arriving_s: dict[str, float] = {}
        self._written_s = 0.0

    def plays(self, action: Action) -> bool:
        return action.lane not in _OF_NO_TIER and action.kind in (ActionKind.GATHER, ActionKind.REDUCE)

    def play(self, action: Action) -> Message | None:
        """One of these; the message if there is one."""
        if self._times is None or action.lane not in self._times.bandwidths:
            raise AssertionError("transfers need bandwidths")
        return (
            self._read(action, self._times)
            if action.kind is ActionKind.GATHER
            else self._write(action, self._times)
        )

    def _read(self, action: Action, times: TransferTimes) -> Message | None:
        if not action.overlaps and action.unit in self._arriving_s:
            self._lanes.wait_for_transfer(self._arriving_s.pop(action.unit))
        message = self._engine.act(action)
        if message is None:
            return None  # it is there
        self._compute(action, self._own.gather_s(action.unit))
        read_s = times.read_s(action.lane, message.size_bytes)
        end_s = self._lanes.transfer(action.lane, f"gather {action.unit}", read_s)
        if action.overlaps:
            self._arriving_s[action.unit] = end_s
        else:
            self._lanes.wait_for_transfer(end_s)
        return message

    def _write(self, action: Action, times: TransferTimes) -> Message:
        self._lanes.wait_for_transfer(self._written_s)
        self._engine.end_scattering()
        adds = self._engine.has_gradient_away(action.unit)
        message = self._engine.act(action)
        if message is None:
            raise AssertionError("a reduction has something to write")
        label = f"reduce {action.unit}"
        self._compute(action, self._own.transfer_s() * (2 if adds else 1))
        if adds:
            read_s = times.read_s(action.lane, message.size_bytes)
            self._lanes.wait_for_transfer(self._lanes.transfer(action.lane, label, read_s))
        write_s = times.write_s(action.lane, message.size_bytes)
        self._written_s = self._lanes.transfer(action.lane, label, write_s)
        if not action.overlaps:
            self._lanes.wait_for_transfer(self._written_s)
        return message

    def _compute(self, action: Action, seconds: float) -> None:
        self._lanes.compute(f"engine at the {action.kind.value} of {action.unit}", seconds)

    def end_backward(self) -> None:
        """All is written, and what has been read and not asked for is dropped."""
        self._lanes.wait_for_transfer(self._written_s)
        self._written_s = 0.0
        self._engine.drop(self._arriving_s)
        self._arriving_s.clear()
