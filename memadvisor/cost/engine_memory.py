"""What the built-in engine holds of parameters, gradients and optimizer state at each moment of a step.

This mirrors memadvisor/engines (flat.py, wire.py): a unit's parameters of one dtype and trainability lie in
one flat, padded to a multiple of the ranks. What each thing takes is in engine_units.py. With more than one rank,

- parameters: stage 0 leaves them where they were; 1 and 2 keep the full flat, of which the shard is a slice;
  3 keeps a shard of its own and has the full flat beside it between gather and release;
- a second copy of what stage 3 releases: this rank's part, from that release to the gather for the backward;
- gradients: a full flat from the unit's first gradient on; stages 0 and 1 keep it, 2 and 3 until the
  reduction, which leaves a shard; between ranks of a CPU 2 and 3 have what is large of them where autograd made it, and
  a buffer for the rest; what the script has dropped is free from the next forward on;
- with an optimizer dtype, shards of narrow parameters and of their gradients, and their state, are in it; stages 1 and 2
  have these masters beside the parameters, and stage 1 casts its pieces of a unit's gradients for its update;
- with a precision, gathered flats are in its parameter dtype, and buffers of gradients and their staging in its
  reduction dtype; shards of parameters and gradients are in the parameters' own;
- reduce_scatter has a shard of staging beside the full flat and, when accumulating, the older shard; one that
  overlaps keeps the full flat and the staging until a later one waits for it, and one by messages at once has more of it;
- a unit that is updated in the backward has no gradient from then on until the next one;
- with compression, a gather has the messages of all ranks beside the full flat until it is waited for, and
  scratch where the flat is not float32; a reduction to shards has two messages more of staging;
- an average of parameters, of stage 0, has a copy of a unit's beside them;
- all-reduces that share a message have a copy of all of it until the backward ends;
- optimizer state is made for this rank's pieces from stage 1 on. Step counters are not sharded;
- an optimizer that needs whole parameters keeps all of a parameter's state on one rank, which has beside it, while
  the optimizer steps, its own parameters' gradients (stages 2 and 3) and values (3). The rank with most is meant;
- parameters and gradients of a unit that lie on another tier, on one rank, are there as with stage 3 while they are used,
  and while the optimizer steps in two pairs of buffers;
- optimizer state that lies on another tier is in two buffers while the optimizer steps, and else not there; that of
  units in codes is in codes, and one after another in one buffer while the optimizer steps.

The engine replaces DDP, so DDP's buckets are not here. One rank keeps what the plain run keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from memadvisor.coded_states import TABLES_BYTES
from memadvisor.cost.activations import View
from memadvisor.cost.all_reduces import AllReduces
from memadvisor.cost.dropped_gradients import DroppedGradients
from memadvisor.cost.engine_units import EngineUnits
from memadvisor.cost.messages import Message
from memadvisor.cost.present import Present
from memadvisor.cost.reduction_staging import scattered, written
from memadvisor.cost.second_copies import SecondCopies
from memadvisor.cost.state_pieces import STAND_IN
from memadvisor.cost.step import CapturedStep, Segment
from memadvisor.cost.widened_gradients import WidenedGradients
from memadvisor.loose import is_loose
from memadvisor.schedule import Action, ActionKind, Point, Ranks, Schedule


class EngineMemory:
    """The states of one rank while a schedule is played."""

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        if schedule.precision != step.precision:
            raise AssertionError("a step is played in the precision that it was cut for")
        self.step = step
        self._units = units = EngineUnits(step, schedule)
        self.num_ranks = units.num_ranks  # that share what is sharded
        self.stages = units.stages
        # One rank, recorded as one rank: nothing of ours touches the states, so they are replayed.
        elsewhere = bool(units.away or units.paged)
        self.replays = self.num_ranks == step.world_size == step.repeats == 1 and not elsewhere
        self._widened = WidenedGradients(units.sizes, self.stages)
        self.updates = units.update_shares(schedule, self._widened)
        self._resting = units.resting()
        self.gathered = Present(units.full_bytes)
        self._second = SecondCopies(units.full_bytes, schedule.size_of(Ranks.SECONDARY))
        self._buffers = Present(units.own_gradient_bytes)  # units whose whole gradients are there
        self._shards = Present(units.shard_bytes)  # units of whose gradients there is this rank's shard
        self.stale: set[str] = set()  # units that lack what other ranks have updated
        # Units gathered ahead whose messages are there.
        self._unpacking = Present({name: each.gather_staging_bytes for name, each in units.packed.items()})
        self._all_reduces = AllReduces(units.gradient_bytes, units.packed)
        self._scattering: list[str] = []  # units whose reductions to shards are under way, the oldest first
        self._reduce_depth = schedule.reduce_depth
        self._dropped = DroppedGradients(step, self.stages, self.num_ranks)
        self._fetched = units.fetched()
        self._is_stepping = False
        self._held: dict[str, int] = {}  # what was held last, and of which bytes it is made
        self._held_now: tuple[int, int, int] | None = None
        self._hold_gradients_of_step_before(schedule.updated_in_backward)

    def _hold_gradients_of_step_before(self, spent: Collection[str]) -> None:
        """`spent`: units whose updates in the backward have used theirs up."""
        segments = self.step.segments
        if self.num_ranks > 1 or (segments and segments[0].captured.start.get("gradient")):
            for name, stage in self.stages.items():
                if name not in spent:
                    (self._shards if stage >= 2 else self._buffers).add(name)

    def held(self) -> dict[str, int]:
        """Bytes of states alive now, beyond what the replayed segments hold themselves."""
        if self.replays:
            return {}
        parameter_bytes = self.gathered.total_bytes + self._second.parts.total_bytes
        gradient_bytes = self._buffers.total_bytes + self._shards.total_bytes
        message_bytes = self._unpacking.total_bytes + self._all_reduces.staging_bytes
        for name in self._scattering:
            staging_bytes = self._units.staging_bytes(name)
            # What arrives becomes this rank's shard, and is called so from its birth; or is added to one.
            arriving_bytes = 0 if name in self._shards else min(staging_bytes, self._units.shard_bytes[name])
            gradient_bytes += arriving_bytes
            message_bytes += staging_bytes - arriving_bytes
        is_in_step = self._is_stepping or self._fetched.is_there
        now = parameter_bytes, gradient_bytes, message_bytes
        if now == self._held_now and not is_in_step:
            return self._held  # the very same, as at most moments
        held = dict(self._resting)
        held["parameter"] += parameter_bytes
        held["gradient"] = gradient_bytes
        held["communication"] += message_bytes
        self._held_now, self._held = None if is_in_step else now, held
        if is_in_step:
            for (category, _), size_bytes in (*self._lent_to_step().items(), *self._fetched.items().items()):
                held[category] += size_bytes
        return held

    def state_bytes(self, name: str) -> int:
        """What is fetched, or expanded, of a unit's state for its update."""
        return self._units.state_bytes(name)

    def update_traffic(self, name: str) -> tuple[int, int]:
        """Bytes that are read, and written, for the update of a unit whose state is fetched."""
        own_bytes = self._units.sizes[name].flats.trainable_bytes if name in self._units.paged else 0
        return self.state_bytes(name) + 2 * own_bytes, self.state_bytes(name) + own_bytes

    def coding_bytes(self, name: str) -> int:
        """Beside what `held` counts, while a unit's state is coded or decoded."""
        return self._units.codes[name].scratch_bytes if name in self._units.codes else 0

    def _lent_to_step(self) -> dict[tuple[str, str], int]:
        """What the rank with most is sent of its own parameters while the optimizer steps, and what it casts."""
        if not self._is_stepping:
            return {}
        lent = self._widened.held()
        for name, owned in self._units.owned.items():
            if self.stages[name] >= 2:
                lent["gradient", name] = owned.parameter_bytes
            if self.stages[name] == 3:
                lent["parameter", name] = owned.parameter_bytes
        return lent

    @property
    def must_end_scattering(self) -> bool:
        """Whether the oldest reduction to shards must be over before another begins."""
        return len(self._scattering) >= self._reduce_depth

    def held_by_autograd(self, segment: Segment) -> int:
        """Bytes of the last gradient of a segment's unit that autograd holds beside what the engine has, while what follows
        from it is begun."""
        size_bytes = segment.last_gradient_bytes
        return 0 if segment.unit in self._units.loose and is_loose(size_bytes) else size_bytes

    def is_reducing(self, name: str) -> bool:
        """Whether a unit's reduction to shards is under way."""
        return name in self._scattering

    def has_gradient_away(self, name: str) -> bool:
        return name in self._units.paged and name in self._shards

    def spend(self, name: str) -> None:
        """A unit has been updated in the backward: its gradient is free, and other ranks lack its new values."""
        self._shards.discard(name)
        if self.stages[name] in (1, 2):
            self.stale.add(name)

    def end_scattering(self) -> str | None:
        """The oldest reduction to shards that was under way has ended: what is left of the gradient is a shard. Gives the unit."""
        if not self._scattering:
            return None
        self._keep_shard(name := self._scattering.pop(0))
        return name

    def _keep_shard(self, name: str) -> None:
        self._buffers.discard(name)
        self._shards.add(name)

    def _gradients(self) -> dict[str, int]:
        """Bytes of gradients by unit: the buffer, and the shard of earlier micro-batches."""
        return dict(Counter(dict(self._buffers.items())) + Counter(dict(self._shards.items())))

    def end_forward(self, arriving: dict[str, int]) -> None:
        """Of stage 3, what was gathered ahead in the forward and not asked for is dropped."""
        for name in [name for name in arriving if self.stages[name] == 3]:
            del arriving[name]
            self.gathered.discard(name)
            self._unpacking.discard(name)

    def drop(self, names: Collection[str]) -> None:
        """A backward has ended: these were gathered ahead and are not needed, and whole gradients are reduced."""
        self._all_reduces.end()
        self._second.parts.clear()
        for name in names:
            self.gathered.discard(name)
            self._unpacking.discard(name)

    def tensors(self) -> dict[tuple[str, str], int]:
        """What `held` sums up, in pieces: bytes by (what it is, unit). A piece is allocated as one."""
        if self.replays:
            return {}
        pieces = {(f"constant {category}", ""): size for category, size in self._units.constant_bytes.items()}
        for name in self.stages:
            pieces["parameter", name] = self._units.parameter_bytes(name)
            pieces["optimizer_state", name] = self._units.optimizer_bytes(name)
        pieces |= {(STAND_IN, name): size for name, size in self._units.stand_ins.items()}
        pieces |= {("gathered", name): size for name, size in self.gathered.items()}
        pieces |= {("second copy", name): size for name, size in self._second.parts.items()}
        pieces |= {("gradient", name): size for name, size in self._gradients().items()}
        pieces |= {(f"owned {what}", name): size for (what, name), size in self._lent_to_step().items()}
        pieces |= {("messages", name): size for name, size in self._unpacking.items()}
        pieces |= {("all-reduced", name): size for name, size in self._all_reduces.items()}
        pieces |= {("code tables", ""): TABLES_BYTES if self._units.codes else 0}
        pieces |= {(f"fetched {w}", str(side)): size for (w, side), size in self._fetched.items().items()}
        pieces |= {("residual", name): packed.residual_bytes for name, packed in self._units.packed.items()}
        pieces |= {("staging", name): self._units.staging_bytes(name) for name in self._scattering}
        return {piece: size for piece, size in pieces.items() if size > 0}

    def view(self, segment: Segment) -> View:
        """Which view of a segment is what is alive in it beside `held`."""
        if self.replays:
            return "captured"
        if all(self._is_collecting(name) for name in segment.gradient_units):
            return "passing_gradients"
        if all(self._is_collecting(name) or name in self._units.loose for name in segment.gradient_units):
            return "loose_gradients"
        is_collected = self.num_ranks > 1 or any(name in self._units.paged for name in segment.gradient_units)
        return "collected_gradients" if is_collected else "own_gradients"

    def enter(self, segment: Segment, *, is_again: bool = False) -> None:
        """Gradients of the step before are gone when the captured ones were. `is_again`: a micro-batch is played again, and
        adds to those of the time before."""
        self._is_stepping = self._fetched.is_there = segment.phase == "optimizer"
        dropped = self._dropped.enter(segment)
        for present in () if is_again or not dropped else (self._buffers, self._shards):
            for name in [name for name, _ in present.items() if name in dropped]:
                present.discard(name)

    def leave(self, segment: Segment) -> None:
        """The gradients that came in this segment are held from now on."""
        for name in segment.gradient_units:
            self._buffers.add(name)

    def turn(self, point: Point) -> None:
        """A boundary is reached, whose actions follow."""
        self._fetched.is_there |= point is Point.BEFORE_OPTIMIZER
        self._fetched.is_there &= point is not Point.AFTER_OPTIMIZER

    def act(self, action: Action) -> Message | None:
        """Do an action's change of memory, and say which message it needs."""
        change = _CHANGES.get(action.kind)
        return None if change is None else change(self, action)

    def _gather(self, action: Action) -> Message | None:
        name = action.unit
        if not action.overlaps:
            self._unpacking.discard(name)
        if not self._lacks(name) or self._second.is_spent(action):
            self._second.found(action)
            return None  # it was gathered ahead, or its backward is over
        self.stale.discard(name)
        if self.stages[name] < 3:
            full_bytes = self._units.sizes[name].flats.full_bytes
            return Message(operation="all_gather", size_bytes=full_bytes, staging={})
        self.gathered.add(name)
        if action.ranks is Ranks.SECONDARY:
            return self._second.take(action)
        if action.overlaps:
            self._unpacking.add(name)
        return self._gather_message(name, waits=not action.overlaps)

    def _release(self, action: Action) -> Message | None:
        self.gathered.discard(action.unit)
        return self._second.leave(action.unit) if action.ranks is Ranks.SECONDARY else None

    def _average(self, action: Action) -> Message:
        size_bytes = self._units.sizes[action.unit].flats.trainable_bytes
        copies = {"communication": size_bytes}
        return Message(operation="all_reduce", size_bytes=size_bytes, staging=copies, beside=copies)

    def _update(self, action: Action) -> None:
        if self.stages[action.unit] in (1, 2):
            self.stale.add(action.unit)

    def _lacks(self, name: str) -> bool:
        """Whether parameters have to come from other ranks."""
        return name not in self.gathered if self.stages[name] == 3 else name in self.stale

    def _reduce(self, action: Action) -> Message:
        name, size_bytes = action.unit, self._units.gradient_bytes[action.unit]
        if action.ranks is Ranks.ACROSS:
            # Of what the reduction inside has just left; its buffers are counted there, and are no fewer.
            return Message(operation="all_reduce", size_bytes=size_bytes // self.num_ranks, staging={})
        if not action.shard:
            return Message(operation="all_reduce", size_bytes=self._all_reduces.begin(action), staging={})
        if name in self._units.paged:
            return self._put_away(action)
        if action.overlaps:
            self._scattering.append(name)
            return Message(operation="reduce_scatter", size_bytes=self._units.reduce_bytes(name), staging={})
        shard_bytes = self._units.shard_bytes[name]
        older_bytes = shard_bytes * (name in self._shards)
        self._keep_shard(name)
        return scattered(
            self._units.reduce_bytes(name),
            self._units.own_gradient_bytes[name],
            self._units.staging_bytes(name),
            older_bytes,
            shard_bytes,
        )

    def _put_away(self, action: Action) -> Message:
        """A gradient that is written."""
        name = action.unit
        older_bytes = self._units.gradient_bytes[name] * self.has_gradient_away(name)
        if action.overlaps:
            self._scattering.append(name)
        else:
            self._keep_shard(name)
        return written(self._units.gradient_bytes[name], older_bytes, overlaps=action.overlaps)

    def _gather_message(self, name: str, *, waits: bool) -> Message:
        packed = self._units.packed.get(name)
        if packed is None:
            return Message(
                operation="all_gather", size_bytes=self._units.sizes[name].flats.full_bytes, staging={}
            )
        staging = {"communication": packed.largest_gather_staging_bytes} if waits else {}
        return Message(
            operation="all_gather", size_bytes=packed.gather_bytes, staging=staging, beside=staging
        )

    def _is_collecting(self, name: str) -> bool:
        """Whether the full flat of gradients is there already; stages 2 and 3 make a new one each time."""
        return not self._units.gradient_bytes.get(name, 0) or name in self._buffers


# Looked up, since a search asks hundreds of thousands of times.
_CHANGES: Mapping[ActionKind, Callable[[EngineMemory, Action], Message | None]] = {
    ActionKind.GATHER: EngineMemory._gather,
    ActionKind.RELEASE: EngineMemory._release,
    ActionKind.REDUCE: EngineMemory._reduce,
    ActionKind.AVERAGE: EngineMemory._average,
    ActionKind.UPDATE: EngineMemory._update,
}
