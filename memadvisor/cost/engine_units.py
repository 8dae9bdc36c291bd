"""What each unit takes of one rank under the built-in engine, whatever the moment: engine_memory.py says when it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from memadvisor.coded_states import TABLES_BYTES
from memadvisor.compression import UNCOMPRESSED
from memadvisor.cost.coded_memory import CodedMemory, coded_memory
from memadvisor.cost.owners import largest_share
from memadvisor.cost.packing import packing_of
from memadvisor.cost.paged_updates import FetchedStates
from memadvisor.cost.reduction_staging import together_bytes
from memadvisor.cost.states import UnitStates
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.unit_sizes import unit_sizes
from memadvisor.cost.update_shares import NOTHING_OWNED, UpdateShares
from memadvisor.cost.widened_gradients import WidenedGradients
from memadvisor.schedule import Lane, Schedule

# A unit whose spans were seen, but which has no row: a model that was not discovered as such.
_NO_PARAMETERS = UnitStates(name="", parameters=(), optimizer_bytes=0, optimizer_scalar_bytes=0)


class EngineUnits:
    """Of the units of a schedule, by name.

    num_ranks: that share what is sharded. paged: units whose parameters and gradients lie elsewhere. away: units whose
    optimizer state is fetched for their update, and from where. owned: of units whose optimizer needs whole parameters,
    what the rank with most owns. codes: of units whose state is in codes between updates. full_bytes: of parameters,
    whole; gradient_bytes: of flats of gradients, whole; loose: of all gradients of units some of which stay where they are
    made; own_gradient_bytes: of what is there of both until it is reduced; shard_bytes: of this rank's shard of those.
    packed: of messages, with compression. together: staging that messages at once take more. stand_ins: what stands for
    released parameters.
    """

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self._step = step
        self.num_ranks = ranks = schedule.shard_ranks
        self.stages = stages = {u.name: u.stage_on(ranks) for u in schedule.units}
        self.paged = schedule.paged
        self.away = schedule.offloaded_states
        states = {name: step.states.get(name) or _NO_PARAMETERS for name in stages}
        self._states: Mapping[str, UnitStates] = states
        is_alone = ranks == step.world_size == 1  # DDP is left in place then, and its buckets with it
        self.constant_bytes = {
            category: size
            for category, size in step.constant_state_bytes.items()
            if is_alone or category != "communication"
        }
        precision = schedule.precision
        self.sizes = {
            name: unit_sizes(states[name], stage, ranks, precision) for name, stage in stages.items()
        }
        flats = {name: sizes.flats for name, sizes in self.sizes.items()}
        self.full_bytes = {name: flat.full_bytes for name, flat in flats.items()}
        self.gradient_bytes = {name: flat.buffer_bytes for name, flat in flats.items()}
        is_sent_as_made = step.device == "cpu" and schedule.compression.reduce_bits is None
        sharded = self.sizes.items() if is_sent_as_made else ()
        self.loose = {name: own for name, sizes in sharded if (own := sizes.loose_bytes) is not None}
        self.own_gradient_bytes = self.gradient_bytes | self.loose
        self.shard_bytes = {
            name: 0 if name in self.paged else flat.trainable_bytes // ranks for name, flat in flats.items()
        }
        released = [name for name, stage in stages.items() if stage == 3 or name in self.paged]
        of_type = step.device, precision.param_dtype
        self.stand_ins = {name: states[name].stand_in_bytes(*of_type) for name in released}
        packed = stages.items() if schedule.compression != UNCOMPRESSED else ()
        self.packed = {name: packing_of(states[name], stage, ranks, schedule) for name, stage in packed}
        asked = stages.items() if schedule.algorithms else ()
        self.together = {name: together_bytes(states[name], stage, schedule) for name, stage in asked}
        self.owned = largest_share(step.states, [name for name, stage in stages.items() if stage], ranks)
        self.codes = self._coded()

    def _coded(self) -> Mapping[str, CodedMemory]:
        coded = {
            name: (self._states[name], self.num_ranks if self.stages[name] else 1, self.sizes[name].widening)
            for name, lane in self.away.items()
            if lane is Lane.COMPUTE
        }
        return coded_memory(coded, self._step.device)

    # ---- at rest -----------------------------------------------------------------------------

    def resting(self) -> dict[str, int]:
        """Bytes that are there at every moment, by category."""
        resting = Counter(self.constant_bytes)
        resting["parameter"] += sum(map(self.parameter_bytes, self.stages)) + sum(self.stand_ins.values())
        resting["communication"] += sum(packed.residual_bytes for packed in self.packed.values())
        resting["optimizer_state"] += sum(map(self.optimizer_bytes, self.stages))
        resting["other"] += TABLES_BYTES if self.codes else 0
        return dict(resting)

    def parameter_bytes(self, name: str) -> int:
        """Those that are there at every moment."""
        return 0 if self.stages[name] and name in self.paged else self.sizes[name].resting_bytes

    def optimizer_bytes(self, name: str) -> int:
        """State that is there at every moment."""
        states = self._states[name]
        pieces = states.optimizer_scalar_bytes
        if name in self.codes or name not in self.away:
            pieces += self.codes[name].resting_bytes if name in self.codes else self.state_bytes(name)
        if not self.stages[name]:
            given_bytes = 0 if name in self.away else states.given_optimizer_bytes
            return pieces + self.sizes[name].whole_state_bytes + given_bytes
        return pieces + self.sizes[name].master_bytes + self.owned.get(name, NOTHING_OWNED).state_bytes

    # ---- while it is updated -----------------------------------------------------------------

    def state_bytes(self, name: str) -> int:
        """This rank's state of a unit with an element for each of a parameter's; what is expanded, of a unit in codes."""
        if name in self.codes:
            return self.codes[name].decoded_bytes
        return self.sizes[name].state_bytes

    def fetched(self) -> FetchedStates:
        """What is fetched from elsewhere while the optimizer steps."""
        paged = {name: self.sizes[name].flats.trainable_bytes for name in self.paged}
        return FetchedStates(self.away, {name: self.state_bytes(name) for name in self.away}, paged)

    def update_shares(self, schedule: Schedule, widened: WidenedGradients) -> UpdateShares:
        return UpdateShares(
            {name: states.trainable_bytes for name, states in self._states.items()},
            self.sizes,
            self.stages,
            self.owned,
            widened,
            num_ranks=self.num_ranks,
            early=schedule.updated_in_backward,
            apart={*self.away, *schedule.updated_alone},
            together=self._step.updates_together,
            own=self._step.own_updates,
        )

    # ---- while it travels --------------------------------------------------------------------

    def staging_bytes(self, name: str) -> int:
        """Beside a gradient that is reduced to shards."""
        if name in self.paged:
            return 0  # it is written from where it is
        packed = self.packed.get(name)
        messages_bytes = 0 if packed is None else packed.reduce_staging_bytes
        return self.gradient_bytes[name] // self.num_ranks + messages_bytes + self.together.get(name, 0)

    def reduce_bytes(self, name: str) -> int:
        """The message of a reduction to shards."""
        packed = self.packed.get(name)
        return self.gradient_bytes[name] if packed is None else packed.reduce_bytes
