"""One captured training step as the simulator needs it: segments in order, and what outlives them.

A segment is a stretch of the step in which no unit boundary is crossed. Bytes that a plan can move are
told apart from bytes that it cannot, so that replaying the segments unchanged gives the measured peak.
`analyzers/segments.py` makes these from a run; docs/planning.md explains the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from memadvisor.cost.kept import ForwardOperators
from memadvisor.cost.late_sharding import NOTHING_LATE, LateSharding
from memadvisor.cost.level import Level, Totals
from memadvisor.cost.own_updates import OwnUpdates
from memadvisor.cost.parts import PartedOptions
from memadvisor.cost.places import place_in
from memadvisor.cost.play_order import play_order
from memadvisor.cost.rounded_activations import RoundableStorage, RoundingCost, Timeline
from memadvisor.cost.saved import CallUses, SavedStorages
from memadvisor.cost.second_run import FREE, SecondRun, SecondRunCost
from memadvisor.cost.states import UnitStates
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.parallel_records import ShardGroup
from memadvisor.run.records import Unit

Bytes = Mapping[str, int]  # by category
NOTHING: Bytes = {}
SecondRuns = Mapping[tuple[str, int | None], SecondRun]  # by unit and pass
PartedPasses = Mapping[tuple[str, int | None], PartedOptions]

# Categories that a plan rewrites as a whole: under our engine they are modelled, not replayed.
STATES = ("parameter", "gradient", "optimizer_state", "communication")
VIEWS = ("captured", "own_gradients", "passing_gradients", "collected_gradients", "loose_gradients")
_CALLS_APART = 2**20


def pass_number(micro_batch: int | None, call: int) -> int | None:
    """Of a call of a unit in a micro-batch; of the first call the micro-batch's own."""
    return None if micro_batch is None else micro_batch + call * _CALLS_APART


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`unit` None: outside any unit, such as the loss or the optimizer step. `micro_batch` None: in none. `call`: which
    of the unit's calls in the micro-batch it is, or is the backward of.

    Five views of the same stretch. captured: everything that was alive. The others are without `STATES`, but
    for gradients that are born in this very segment: own_gradients keeps them; passing_gradients
    has each for the moment of its birth, as if something took it over; collected_gradients adds to
    that the whole gradients of `gradient_units` from the first birth on, as one buffer that collects them;
    loose_gradients keeps the large ones (memadvisor/loose.py), and collects the others so.
    growth: what the segment itself brings into being and had alive at its highest instant: the cost
    of running a forward again, until the last tensor that its backward needs is there.
    last_gradient_bytes: of the last gradient that is added to those of its unit: autograd holds it while what follows from
    that is begun. 0 where it becomes the unit's buffer.
    lenders: other units whose modules it calls, or is the backward of such calls of (two blocks that hold the same layer).
    loans_ended: those of them of which no backward comes in a later segment of the micro-batch, their own neither.
    live_gradients: of several models, those of whose units gradients are there when it begins; None where the script has
    one.
    """

    phase: str
    unit: str | None
    micro_batch: int | None
    duration_s: float
    captured: Level
    own_gradients: Level
    passing_gradients: Level
    collected_gradients: Level
    loose_gradients: Level
    gradient_units: tuple[str, ...]
    growth: Bytes
    live_gradients: frozenset[str] | None = None
    call: int = 0
    walk: int = 0
    last_gradient_bytes: int = 0
    lenders: tuple[str, ...] = ()
    loans_ended: tuple[str, ...] = ()

    @property
    def pass_number(self) -> int | None:
        return pass_number(self.micro_batch, self.call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """Bytes that only unit `unit` keeps from its forward for its backward.

    Where the unit is recomputed they are temporaries, free after its forward or a later segment, and are
    there again in its backward. `earlier_copies`: from which segment to which there is one beside, of a second run for a
    derivative that the loss is made of.
    """

    unit: str
    category: str
    size_bytes: int
    birth_segment: int
    freed_after_segment: int
    death_segment: int
    earlier_copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTensor:
    """A tensor that flows between units, and how long each of them needs it.

    `last_use_segment` is its last use in the forward. `saved_until` says for each unit that autograd keeps it for, in
    which segment it is released; `saved_by_takers` those that save it when they take it. `input_of` gives the backward
    segment of each unit that takes it: recomputing that unit keeps it so long. `missed_bytes`: what the segment that it
    dies in would reach beyond what it does, if it lived on. `earlier_copies`: as of an `Inner`, where its maker saves it.
    `cast_again`, of a weight that autocast has cast: each call of a unit that saves it, by the segment of its backward, and
    of that where it is released. Its cache ends with the forward, so each of them casts anew when it runs again.
    """

    category: str
    size_bytes: int
    birth_segment: int
    death_segment: int
    missed_bytes: int
    last_use_segment: int
    saved_until: Mapping[str, int]
    input_of: Mapping[str, int]
    cast_again: tuple[tuple[str, int, int], ...] = ()
    earlier_copies: tuple[tuple[int, int], ...] = ()
    saved_by_takers: frozenset[str] = frozenset()
    by_call: CallUses | None = None  # where a unit that is called several times uses it


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStorage:
    """One allocation of the captured step, so that the sequence of all of them can be played again.

    `number`: as parts of units know it (parts.py). Segments are as above (-1: before the step; their number: after
    it); times order what happens within one. `freed_by`: the unit whose recomputation sets it free; it then dies at
    `unsaved_death` (segment, time). `boundary` is set for what flows between units, `saved` for what an engine may
    take meanwhile. `runs_again`: a recomputation of its unit allocates it too. `stream`: whose memory it is; 0 is the
    one that computes. `owner`: the unit whose state it is. `comes`: segment and time of the training's first step in
    which what is there before the captured one came. `in_place_of`: the number of the one in whose memory it is in
    steps that are not traced. `cached`: the unit that has put it into a cache of keys and values, and from when on
    (segment, time) the cache alone holds it; -1: from the start. `accumulated`: segment and time when autograd adds
    it to a parameter's gradient, where that is known.
    """

    category: str
    size_bytes: int
    birth_segment: int
    birth_s: float
    death_segment: int
    death_s: float
    freed_by: str | None = None
    unsaved_death: tuple[int, float] = (0, 0.0)
    boundary: BoundaryTensor | None = None
    saved: SavedStorages | None = None
    runs_again: bool = False
    stream: int = 0
    owner: str | None = None
    comes: tuple[int, float] | None = None
    in_place_of: int | None = None
    cached: tuple[str, tuple[int, float]] | None = None
    accumulated: tuple[int, float] | None = None
    number: int = -1


@dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """The traced step of one rank. Durations are of the timed steps and sum to `step_time_s`.

    `synced_micro_batches` are those whose backward ended in a reduction over the ranks, as recorded; empty where none
    was. `peak_bytes` is the allocator's own where it was recorded, else that of the rows. `constant_state_bytes` are
    state bytes that belong to no unit's parameters. `exposed_communication_s` is inside `step_time_s`, and in no
    segment's duration. `repeats`: how often each micro-batch of the segments is run; 1 as captured. `precision`: of the
    schedules that may be played over it. `leaves_gradients_alone`: between the last backward and the optimizer step, as
    far as is known. `late`: what the script's FSDP2 leaves to the last micro-batch. `updates_together`: the optimizer's
    own temporaries are of all parameters that one of its steps updates (foreach); `may_update_by_unit`: an engine may
    have it update some at a time; `own_updates`: what it allocates for some of them. `shard_groups`: those of a script
    that shares its model by FSDP2; `holder`: who keeps engines from moving states, "FSDP2", or parameters,
    "torch.compile". `saved`: what units' forwards keep for their backwards and may wait elsewhere. `roundable`: what of
    it may be in fewer bits meanwhile; `timelines`: what comes and goes in each segment; `rounding_cost`: None where it
    was not measured. `make_parted`: see `parted`. `second_runs`: what each unit's forward of a micro-batch would run
    again; `second_run_cost`: what that takes beside. `time_factors`: what runs on this machine have taught, by component
    of the step time (components.py); 1 for those that are not there.
    """

    rank: int
    world_size: int
    device: str
    units: tuple[Unit, ...]
    states: Mapping[str, UnitStates]
    segments: tuple[Segment, ...]
    inner: tuple[Inner, ...]
    boundaries: tuple[BoundaryTensor, ...]
    make_storages: Callable[[], tuple[StepStorage, ...]]  # those of the step
    recomputable: Mapping[str, float]  # unit -> seconds of recomputing it in one step
    operators: Mapping[int, ForwardOperators]  # by forward segment, of units that can keep some of them
    constant_state_bytes: Mapping[str, int]
    step_time_s: float
    exposed_communication_s: float
    peak_bytes: int
    synced_micro_batches: frozenset[int]
    num_micro_batches: int
    repeats: int
    micro_batch_size: int | None
    precision: Precision = FULL_PRECISION
    leaves_gradients_alone: bool = False
    updates_together: bool = False
    may_update_by_unit: bool = False
    own_updates: OwnUpdates = field(default_factory=OwnUpdates)
    shard_groups: tuple[ShardGroup, ...] = ()
    holder: str = ""
    late: LateSharding = NOTHING_LATE
    cached: tuple[Inner, ...] = ()  # by caches of keys and values; not there where the unit is recomputed
    saved: tuple[SavedStorages, ...] = ()
    roundable: tuple[RoundableStorage, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    rounding_cost: RoundingCost | None = None
    second_runs: SecondRuns = field(default_factory=dict)
    second_run_cost: SecondRunCost = FREE
    time_factors: Mapping[str, float] = field(default_factory=dict)
    make_parted: Callable[[SecondRuns, SecondRunCost], PartedPasses] = lambda runs, cost: {}

    @cached_property
    def parted(self) -> PartedPasses:
        """By unit and pass, choices of parts that run again by themselves (parts.py)."""
        return self.make_parted(self.second_runs, self.second_run_cost)

    @cached_property
    def storages(self) -> tuple[StepStorage, ...]:
        """All allocations, which only a device's caching allocator asks for."""
        return self.make_storages()

    @cached_property
    def forwards(self) -> Mapping[tuple[str | None, int | None], tuple[Segment, ...]]:
        """Forward segments by unit and pass."""
        found: dict[tuple[str | None, int | None], list[Segment]] = {}
        for segment in (each for each in self.segments if each.phase == "forward"):
            found.setdefault((segment.unit, segment.pass_number), []).append(segment)
        return {key: tuple(own) for key, own in found.items()}

    @cached_property
    def forward_at(self) -> Mapping[tuple[str | None, int | None], int]:
        """The first forward segment by unit and pass."""
        found: dict[tuple[str | None, int | None], int] = {}
        for position, segment in enumerate(self.segments):
            if segment.phase == "forward":
                found.setdefault((segment.unit, segment.pass_number), position)
        return found

    @cached_property
    def forwards_of(self) -> Mapping[str | None, tuple[tuple[int, int | None], ...]]:
        """By unit, where each of its passes begins, in order, and which that is."""
        found: dict[str | None, list[tuple[int, int | None]]] = {}
        for (unit, number), position in self.forward_at.items():
            found.setdefault(unit, []).append((position, number))
        return {unit: tuple(passes) for unit, passes in found.items()}

    @cached_property
    def backwards(self) -> Mapping[tuple[str | None, int | None], int]:
        """The first backward segment by unit and pass, of the last backward that goes through it."""
        return {key: walks[max(walks)] for key, walks in self._walks.items()}

    @cached_property
    def first_backwards(self) -> frozenset[int]:
        """Where a backward of a unit's pass begins."""
        return frozenset(position for walks in self._walks.values() for position in walks.values())

    @cached_property
    def _walks(self) -> Mapping[tuple[str | None, int | None], dict[int, int]]:
        """By unit and pass, the first segment of each backward that goes through it."""
        found: dict[tuple[str | None, int | None], dict[int, int]] = {}
        for position, segment in enumerate(self.segments):
            if segment.phase == "backward":
                walks = found.setdefault((segment.unit, segment.pass_number), {})
                walks.setdefault(segment.walk, position)
        return found

    @cached_property
    def backward_begins(self) -> Mapping[int | None, int]:
        """The first segment of each micro-batch's backward."""
        reversed_places = reversed([*enumerate(self.segments)])
        return {s.micro_batch: place for place, s in reversed_places if s.phase in ("backward", "recompute")}

    @cached_property
    def inner_of(self) -> Mapping[tuple[str | None, int | None], tuple[Inner, ...]]:
        """What a unit alone keeps, by unit and pass."""
        found: dict[tuple[str | None, int | None], list[Inner]] = {}
        for item in self.inner:
            found.setdefault((item.unit, self.segments[item.birth_segment].pass_number), []).append(item)
        return {key: tuple(items) for key, items in found.items()}

    @cached_property
    def made_by(self) -> Mapping[tuple[str | None, int | None], tuple[BoundaryTensor, ...]]:
        """Tensors between units that a unit's forward makes, by unit and pass."""
        found: dict[tuple[str | None, int | None], list[BoundaryTensor]] = {}
        for tensor in self.boundaries:
            if (maker := self.maker_of(tensor)) is not None:
                number = self.segments[tensor.birth_segment].pass_number
                found.setdefault((maker, number), []).append(tensor)
        return {key: tuple(tensors) for key, tensors in found.items()}

    @cached_property
    def called_again(self) -> frozenset[str]:
        """Units that are called several times in a micro-batch, or gone through by several of its backwards."""
        return frozenset(s.unit for s in self.segments if (s.call or s.walk) and s.unit is not None)

    @cached_property
    def _calls(self) -> Mapping[tuple[str | None, int | None], list[tuple[int, int | None]]]:
        """Forward segments of a unit in a micro-batch, in order, each with its pass."""
        found: dict[tuple[str | None, int | None], list[tuple[int, int | None]]] = {}
        for place, segment in enumerate(self.segments):
            if segment.phase == "forward":
                found.setdefault((segment.unit, segment.micro_batch), []).append((place, segment.pass_number))
        return found

    def pass_from(self, unit: str, position: int) -> int | None:
        """The pass in which a unit is called next from a segment on, in that one's micro-batch; its last where it is not."""
        here = self.segments[position]
        if unit not in self.called_again:
            return here.micro_batch
        calls = self._calls.get((unit, here.micro_batch), [])
        return next((number for place, number in calls if place >= position), calls[-1][1] if calls else None)

    def maker_of(self, tensor: BoundaryTensor) -> str | None:
        """The unit in whose forward a tensor between units is made; None for none."""
        if tensor.birth_segment < 0 or self.segments[tensor.birth_segment].phase != "forward":
            return None
        return self.segments[tensor.birth_segment].unit

    @cached_property
    def totals(self) -> Mapping[str, Totals]:
        """All bytes of the segments' levels, by view."""
        return {
            view: Totals(
                start=tuple(sum(level.start.values()) for level in levels),
                peak=tuple(sum(level.peak.values()) for level in levels),
                peak_unsaved=tuple(sum(level.peak_unsaved.values()) for level in levels),
            )
            for view, levels in {
                view: [getattr(segment, view) for segment in self.segments] for view in VIEWS
            }.items()
        }

    @cached_property
    def users(self) -> tuple[frozenset[str], ...]:
        """Of each tensor between units, those that save it or take it as input."""
        return tuple(frozenset((*tensor.saved_until, *tensor.input_of)) for tensor in self.boundaries)

    @cached_property
    def places(self) -> tuple[str, ...]:
        """Words for where each segment is: `backward of blocks.3`."""
        return tuple(place_in(segment.phase, segment.unit) for segment in self.segments)

    @cached_property
    def order(self) -> tuple[tuple[int, bool, bool], ...]:
        """Positions of segments as they are played (play_order)."""
        return tuple(play_order(self.segments, self.repeats))

    @cached_property
    def models(self) -> Mapping[str, str]:
        """The model that each unit is of, by its name; "" where that was not recorded."""
        return {unit.name: unit.model or "" for unit in self.units}

    @cached_property
    def optimizer_at(self) -> tuple[int, ...]:
        """Positions of the optimizer's segments."""
        return tuple(place for place, segment in enumerate(self.segments) if segment.phase == "optimizer")

    @cached_property
    def edges(self) -> tuple[tuple[bool, bool], ...]:
        """For each segment, whether its boundary is crossed before it, and after it.

        A unit that runs in several pieces of one micro-batch (others run inside it) is entered before the first and left
        after the last, or where loans of it end.
        """
        edges = self._edges([(s.phase, s.unit, s.micro_batch, s.walk) for s in self.segments])
        lent = {(name, s.micro_batch) for s in self.segments for name in s.loans_ended}
        return tuple(
            (enters, leaves and (s.phase != "backward" or (s.unit, s.micro_batch) not in lent))
            for s, (enters, leaves) in zip(self.segments, edges, strict=True)
        )

    @cached_property
    def call_edges(self) -> tuple[tuple[bool, bool], ...]:
        """The same of each call of a unit that is called several times."""
        return self._edges([(s.phase, s.unit, s.pass_number, s.walk) for s in self.segments])

    def _edges(
        self, keys: Sequence[tuple[str, str | None, int | None, int]]
    ) -> tuple[tuple[bool, bool], ...]:
        last = {key: position for position, key in enumerate(keys)}
        first = {key: position for position, key in reversed([*enumerate(keys)])}
        edges = []
        for position, (segment, key) in enumerate(zip(self.segments, keys, strict=True)):
            is_units = segment.phase in ("forward", "backward") and segment.unit is not None
            counts = segment.phase == "optimizer" or is_units
            edges.append((counts and first[key] == position, counts and last[key] == position))
        return tuple(edges)
