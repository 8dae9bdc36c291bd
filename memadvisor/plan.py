"""A plan: what to change about a training, and what that is predicted to give. Pure data.

A plan names units of one model (memadvisor/run/cut.py) and says for each its ZeRO stage and whether
its forward is recomputed in the backward. The model's fingerprint keeps it from being applied to another.
It is kept as JSON (plan_file.py), and nothing is done with one that plan_checks.py refuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.compression import UNCOMPRESSED, Compression
from memadvisor.executors import Algorithm
from memadvisor.local_sgd import LocalSgd
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.cut import innermost
from memadvisor.stretches import units_of_stretches

TIERS = ("device", "host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """`zero_stage` 0 replicates everything, 1 shards optimizer state, 2 gradients too, 3 parameters too.

    `reshard`: with stage 3, the full parameters are freed after the forward and gathered again for the
    backward; without it they stay from the forward until the unit's backward is over.
    `optimizer_tier`: where the optimizer's state lies between updates: "device", "host" (a GPU's) or "disk".
    `optimizer_bits`: 8 where its larger states are kept in 8 bits an element between updates (coded_states.py); None: as
    they are. Lossy.
    `kept`: operators of a unit that is recomputed by itself whose outputs stay nevertheless: `aten::addmm#1` for the
    second call of aten::addmm in its forward, `aten::addmm` for all of them. `aten::_to_copy` and `aten::detach` are
    never among them.
    `parts`: modules inside the unit, by their names in the order of their calls, that keep nothing but what the first one
    is called with, and run again before their own backward: in the second run of a recomputed unit, else in the first.
    `kept_calls`: of a unit that is called several times before a backward, and recomputed by itself, the calls that keep what
    they do, by their numbers from 0 on.
    `activation_tier`: where what autograd keeps of the unit is between its forward and its backward: "device", "host" (of
    a GPU) or "disk". Of a recomputed unit that is its inputs, and the outputs of `kept` operators.
    `parameter_tier`: where the unit's parameters and gradients lie between their uses: "device", "host" (of a GPU) or
    "disk". For one rank alone; the unit is of stage 3, and its optimizer state on the same tier.
    `activation_bits`: 8, 4 or 2: what autograd keeps of the unit is rounded to so many bits an element until its backward
    (lossy; activation_bits.py). None: as it is.
    """

    name: str
    zero_stage: int
    recompute: bool
    reshard: bool = True
    optimizer_tier: str = "device"
    kept: tuple[str, ...] = ()
    activation_tier: str = "device"
    optimizer_bits: int | None = None
    activation_bits: int | None = None
    parameter_tier: str = "device"
    parts: tuple[tuple[str, ...], ...] = ()
    kept_calls: tuple[int, ...] = ()

    def stage_on(self, num_ranks: int) -> int:
        """The ZeRO stage that it has in effect: none on one rank, unless what it would share lies elsewhere."""
        return self.zero_stage if num_ranks > 1 or self.parameter_tier != "device" else 0

    @property
    def is_kept(self) -> bool:
        """Whether sharded parameters stay from the forward until the backward is over."""
        return self.zero_stage == 3 and not self.reshard

    @property
    def elsewhere(self) -> str:
        """What is not on the device as it is between its uses, in words; nothing where all is."""
        tiers = {
            "parameters and gradients": self.parameter_tier,
            "optimizer state": self.optimizer_tier,
            "activations": self.activation_tier,
        }
        coded = [f"optimizer state in {self.optimizer_bits} bits"] if self.optimizer_bits is not None else []
        away = [f"{what} on {tier}" for what, tier in tiers.items() if tier != "device"]
        rounded = [f"activations in {self.activation_bits} bits"] if self.activation_bits is not None else []
        return ", ".join([*coded, *rounded, *away])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """One of several models of a script: the name that its units' names begin with ("" for none), the fingerprint of its
    own parameters, and whether any of them is trainable."""

    name: str
    fingerprint: str
    is_trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of a plan, per rank; the largest rank where ranks differ.

    On a CUDA device `peak_bytes`, its parts `by_category_bytes` and `peak_position` are of the replay that `reserved_bytes`
    is of too, in the allocator's blocks; the simulator knows none. `exposed_transfer_s`: how long a step waits for other tiers; None in plans of versions that did not know of these.
    `reserved_bytes`: what a CUDA device's caching allocator holds at most; None for other devices. `sent_bytes`: what
    a rank sends in a step; None in plans of versions that did not count it. `components_s`: what `step_time_s` is the
    sum of (cost/components.py); None in plans of versions that did not keep them.
    """

    peak_bytes: int
    step_time_s: float
    by_category_bytes: dict[str, int]  # at the peak
    exposed_communication_s: float
    peak_position: str  # "backward of blocks.3", where the peak is
    reserved_bytes: int | None = None
    sent_bytes: int | None = None
    exposed_transfer_s: float | None = None
    components_s: dict[str, float] | None = None

    @property
    def needed_bytes(self) -> int:
        """What a budget must hold: the reservation where there is one, else the peak."""
        return self.peak_bytes if self.reserved_bytes is None else self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """What the run that a plan was worked out from measured, without any plan: a rank's peak, and the median step. None: of
    which micro-batch is not told."""

    peak_bytes: int
    step_time_s: float
    num_ranks: int
    micro_batch_size: int | None = None


class LaneInterval(NamedTuple):
    """What a lane (schedule.Lane) does from one moment of a step to another, in seconds from its start."""

    lane: str
    label: str  # "forward of blocks.3", "gather blocks.4"
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank does, where each has models, or parts of them, of its own: stages of a pipeline, or tensor
    parallelism. Fields are those of `Plan`, for the rank by itself. `prediction`: of its own peak; its step is that of
    all ranks together. `timeline`: of a stage its micro-batches' passes, from the start of the pipeline's first one on."""

    rank: int
    fingerprint: str
    units: tuple[UnitPlan, ...]
    models: tuple[PlannedModel, ...] = ()
    prediction: Prediction | None = None
    timeline: tuple[LaneInterval, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`units` empty: a plan made by hand, whose `zero_stage` and `policy` are worked out on the live model.

    `gather_depth`: how many units of stage 3 are gathered ahead of the one that runs. `overlap`: gradients are
    reduced to shards one unit behind, and parameters that stages 1 and 2 have updated are gathered under the next
    forward. But for the latter, both cost the memory of what is under way; what stays whole on every rank is
    reduced under the backward in any case.
    `reduce_depth`: how many units' reductions to shards may be under way at once, with `overlap`. With more than one a rank
    that is behind does not hold the others up, and the link is not idle while a unit's backward lasts.
    `shard_ranks`: how many ranks that follow each other share what is sharded; every such group holds all of it,
    and groups add up their gradients (hybrid sharding). None: all ranks are one group.
    `secondary_ranks`: how many ranks that follow each other share a second copy of what stage 3 frees after a forward,
    from which it is gathered for the backward (ZeRO++'s hpZ, arXiv:2306.10209, section 3.2). None: there is none. Of FSDP2 it
    is the script's own number of `reshard_after_forward`.
    `update_in_backward`: units of stages 2 and 3 are updated, and their gradients freed, as soon as those are reduced.
    `update_by_unit`: the optimizer step updates units one after another, so that what updates of all parameters together
    (foreach) allocate meanwhile is of one unit at a time. Of one after another (for-loop) it is of one parameter anyway.
    With `overlap`, what stages 1 and 2 have updated begins to be gathered behind each unit's update, of stage 3 what the next
    forward begins with.
    `local_sgd`: which steps reduce no gradients, and average parameters now and then instead. None: none.
    `executor`: whose memory and time the prediction is of. `fsdp2`: the script shards its model with `fully_shard`
    and keeps that; units of a group that FSDP2 gathers together are freed after the forward if all of them `reshard`.
    `reshard_model`: so are those of no group inside the model, which stay gathered from the model's forward to the end of
    the backward otherwise.
    `algorithms`: how collectives go; what it says nothing of goes as is usual on the backend.
    `stretches`: first and last names of runs of units of which only the first one's input is kept, and whose forwards
    run again, as one, before the last one's backward; they nest, and a unit's own `recompute` is the innermost.
    `optimizer_tier`, `parameter_tier` and `optimizer_bits`: those of a plan made by hand, for all units.
    `activation_tier` and `activation_units` are of a plan made by hand: which units keep nothing on the device, by name
    or shell pattern; all blocks where there is none. `activation_bits` and `compressed_units` likewise: which units'
    activations are rounded.
    `fused_updates`: torch's own optimizers that have a fused update run it (fused_updates.py). Not bit
    for bit the same.
    `chunked_loss`: the layer before the loss, and the loss, are done for some rows at a time (chunked_loss.py). Not bit
    for bit the same. None: they are as they are.
    `autocast`: "bf16", where forwards run under torch.autocast to bfloat16 (autocast.py). Lossy. None: as the script has it.
    `models`: of a script with several models, those that the plan is about, in the order in which the script first calls
    them with gradients: `units` are of these, and all others are left alone. Empty: the script has one model.
    `ranks`: of a pipeline whose ranks have models of their own, or of ranks that split layers (which all do the same), what
    each of them does, by rank; the plan then has no units itself, and its prediction's peak is that of the fullest rank;
    units may be recomputed, and their activations elsewhere. Empty: all ranks do the same. `ranks_alike`: these ranks split
    layers, so a unit that runs again repeats collectives: what `ranks` say is the same of all.
    `disk_directory`: where the disk tier makes its file; None: the directory for temporary files.
    `delayed_update`: optimizer state that lies elsewhere is updated one step late, under the next step's forward and
    backward (arXiv:2101.06840). Lossy.
    `micro_batch_size` and `grad_accum` are the script's own settings that the prediction assumes; None
    leaves them as they are.
    `timeline`: the lanes as the simulator played them (cost/timeline.py), of the rank that stands for all, before what
    earlier runs have taught of the parts of a step's time. None: made by hand, with choices by rank, or of an older version.
    `plain`: what the same training took without it. None likewise, and where the plan is for another micro-batch.
    """

    fingerprint: str | None = None
    num_ranks: int
    zero_stage: int
    policy: str = "none"  # "chosen" (see units), "none", "every-layer", "sqrt", "selective" or "kwai"
    units: tuple[UnitPlan, ...] = ()
    micro_batch_size: int | None = None
    grad_accum: int | None = None
    prediction: Prediction | None = None
    budget_bytes: int | None = None
    why: str = ""
    overlap: bool = False
    gather_depth: int = 0
    reduce_depth: int = 1
    precision: Precision = FULL_PRECISION
    shard_ranks: int | None = None
    secondary_ranks: int | None = None
    update_in_backward: bool = False
    update_by_unit: bool = False
    compression: Compression = UNCOMPRESSED
    local_sgd: LocalSgd | None = None
    executor: str = "built-in"
    reshard_model: bool = False
    algorithms: tuple[Algorithm, ...] = ()
    stretches: tuple[tuple[str, str], ...] = ()
    optimizer_tier: str = "device"
    activation_tier: str = "device"
    activation_units: tuple[str, ...] = ()
    activation_bits: int | None = None
    compressed_units: tuple[str, ...] = ()
    disk_directory: str | None = None
    optimizer_bits: int | None = None
    parameter_tier: str = "device"
    delayed_update: bool = False
    fused_updates: bool = False
    chunked_loss: ChunkedLoss | None = None
    autocast: str | None = None
    models: tuple[PlannedModel, ...] = ()
    ranks: tuple[RankPlan, ...] = ()
    ranks_alike: bool = False
    timeline: tuple[LaneInterval, ...] | None = None
    plain: PlainRun | None = None

    def of_rank(self, rank: int) -> Plan:
        """What one of `ranks` does, as the plan of a process by itself."""
        own = self.ranks[rank]
        return replace(
            self,
            num_ranks=1,
            ranks=(),
            ranks_alike=False,
            fingerprint=own.fingerprint,
            units=own.units,
            models=own.models,
            prediction=own.prediction,
        )

    def of_model(self, model: PlannedModel) -> Plan:
        """What the plan says of one of its models, whose units keep their names."""
        return replace(
            self,
            fingerprint=model.fingerprint,
            models=(),
            units=tuple(unit for unit in self.units if self.model_of(unit.name) == model.name),
            stretches=tuple(pair for pair in self.stretches if self.model_of(pair[0]) == model.name),
        )

    def model_of(self, unit: str) -> str | None:
        """The name of the model that a unit is of, by its own; None for none of `models`."""
        return innermost(unit, [model.name for model in self.models])

    @property
    def behind(self) -> int:
        """How many units' reductions to shards may be under way beside compute."""
        return self.reduce_depth if self.overlap else 0

    @property
    def gathers_updated_later(self) -> bool:
        """Whether, of units chosen, what the optimizer step updates is gathered under what follows."""
        return self.overlap and any(unit.stage_on(self.num_ranks) in (1, 2) for unit in self.units)

    @property
    def may_gather_before_forward(self) -> bool:
        """Whether units chosen, of stage 3, may begin to be gathered before the forward that needs them."""
        is_ahead = self.overlap and self.gather_depth > 0
        return is_ahead and any(unit.stage_on(self.num_ranks) == 3 for unit in self.units)

    @property
    def group_ranks(self) -> int:
        """How many ranks share what is sharded."""
        return self.num_ranks if self.shard_ranks is None else self.shard_ranks

    @property
    def optimizer_tiers(self) -> set[str]:
        """Where the optimizer's state of any unit lies."""
        return {self.optimizer_tier, *(unit.optimizer_tier for unit in self.units)}

    @property
    def parameter_tiers(self) -> set[str]:
        """Where parameters and gradients of any unit lie."""
        return {self.parameter_tier, *(unit.parameter_tier for unit in self.units)}

    @property
    def leaves_updates_alone(self) -> bool:
        """Whether, on one rank, the optimizer's step is as it was: states and parameters lie where the script has them."""
        return self.parameter_tiers == self.optimizer_tiers == {"device"} and not self.optimizer_codes

    @property
    def activation_tiers(self) -> set[str]:
        """Where what autograd keeps of any unit waits for the backward."""
        units = (*self.units, *(unit for own in self.ranks for unit in own.units))
        return {self.activation_tier, *(unit.activation_tier for unit in units)}

    @property
    def elsewhere(self) -> str:
        """What a plan made by hand has in few bits or on another tier, in words; of other plans their units say it."""
        return UnitPlan(
            name="",
            zero_stage=self.zero_stage,
            recompute=False,
            optimizer_tier=self.optimizer_tier,
            activation_tier=self.activation_tier,
            parameter_tier=self.parameter_tier,
            optimizer_bits=self.optimizer_bits,
            activation_bits=self.activation_bits,
        ).elsewhere

    @property
    def optimizer_codes(self) -> set[int]:
        """Bits of an element of coded optimizer state, of any unit; empty where all is as it is."""
        found = {self.optimizer_bits, *(unit.optimizer_bits for unit in self.units)}
        return {bits for bits in found if bits is not None}

    @property
    def rounded_to(self) -> set[int]:
        """The bits that activations of any unit are rounded to; empty where none are."""
        found = {self.activation_bits, *(unit.activation_bits for unit in self.units)}
        return {bits for bits in found if bits is not None}

    @property
    def is_mixed(self) -> bool:
        """Whether its units differ in stage, or in what they keep until the backward."""
        return len({(unit.zero_stage, unit.is_kept) for unit in self.units}) > 1

    @property
    def recomputed_units(self) -> tuple[str, ...]:
        """Units whose forward runs again, alone or in a stretch, in order of execution."""
        again = {name for stretch in self.unit_stretches for name in stretch}
        return tuple(unit.name for unit in self.units if unit.recompute or unit.name in again)

    @property
    def parted_units(self) -> tuple[str, ...]:
        """Units of which parts run again by themselves, in order of execution."""
        return tuple(unit.name for unit in self.units if unit.parts)

    @property
    def unit_stretches(self) -> tuple[tuple[str, ...], ...]:
        """The names of all units of each stretch of two and more, outer ones first."""
        return units_of_stretches(self.stretches, [unit.name for unit in self.units])


def fingerprint(parameters: Iterable[tuple[str, str, str]]) -> str:
    """A short hash of a model's (parameter name, full shape, dtype) triples, in any order."""
    lines = sorted("\t".join(triple) for triple in parameters)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
