"""A run as a chain of units with measured times and exact bytes, for the cost of layouts (memadvisor/cost/captured_units.py).

A segment of a micro-batch that is in no unit (the sum of two embeddings, the loss) counts to the unit that ran last before
it, forwards and backwards alike. A chain can be cut behind a unit where all that passes to later ones was made by that
very unit, and no parameter is shared across: else a stage would need what an earlier stage but one has made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass

from memadvisor.analyzers.pieces import checkpointing_units, cut_step
from memadvisor.analyzers.utilization import compute_dtype
from memadvisor.cost.captured_units import CapturedModel, CapturedUnit, Pass
from memadvisor.cost.step import STATES, CapturedStep
from memadvisor.errors import UsageError
from memadvisor.run.records import Operator, Storage
from memadvisor.run.run import RankRun, Run

_BACKWARD = ("backward", "recompute")


def captured_model(run: Run, step: CapturedStep) -> CapturedModel:
    """`step` is the run's own (segments.captured_step). Raises UsageError where samples were not recorded, the script shards
    its model itself, or no unit ran.
    """
    rank = run.rank(step.rank)
    if step.shard_groups:
        raise UsageError(
            "The script shards its model itself, with FSDP2, and layouts are worked out from a plain run.",
            hint="profile it without fully_shard, or leave the accelerators' name out of --gpus.",
        )
    if step.micro_batch_size is None:
        raise UsageError(
            "The run does not say how many samples a micro-batch has, or its passes are no accumulation (weights are updated "
            "between them, or a batch comes again), so its times cannot be scaled to others.",
            hint="profile a script whose model takes a batch of tensors.",
        )
    chain = _Chain(rank, step)
    return CapturedModel(
        units=chain.units(),
        device_name=rank.process.device_name,
        on_cpu=rank.process.device == "cpu",
        dtype=compute_dtype(rank),
        parameter_bytes=_item_bytes(rank),
        micro_batch_size=step.micro_batch_size,
        num_micro_batches=step.num_micro_batches,
        batch_samples=step.micro_batch_size * step.num_micro_batches * step.world_size,
        optimizer_s=sum(s.duration_s for s in step.segments if s.phase == "optimizer"),
        outside_s=sum(
            s.duration_s for s in step.segments if s.micro_batch is None and s.phase != "optimizer"
        ),
        step_time_s=step.step_time_s,
        other_bytes=sum(step.segments[0].passing_gradients.start.values()),
        model_flops=sum(row.model_flops for row in rank.operators)
        / (step.micro_batch_size * step.num_micro_batches),
    )


def _item_bytes(rank: RankRun) -> int:
    """Of a parameter's element, by most elements."""
    counts: Counter[int] = Counter()
    for row in rank.parameters:
        if row.num_elements and not row.tied_to:
            counts[row.size_bytes // row.num_elements] += row.num_elements
    if not counts:
        raise UsageError("The model has no parameters, so there is nothing to lay out.")
    return counts.most_common(1)[0][0]


@dataclass(slots=True)
class _Sums:
    """What the operators of one unit's forward, or backward, did in the traced step."""

    flops: int = 0
    moved_bytes: int | None = 0
    num_operators: int = 0

    def add(self, row: Operator) -> None:
        self.flops += row.executed_flops
        self.num_operators += 1
        if row.name.startswith(("c10d", "_c10d_functional")):
            return
        if row.read_bytes is None or row.written_bytes is None or self.moved_bytes is None:
            self.moved_bytes = None
        else:
            self.moved_bytes += row.read_bytes + row.written_bytes


class _Chain:
    """The units of a run, and which of them each segment counts to."""

    def __init__(self, rank: RankRun, step: CapturedStep) -> None:
        self.rank, self.step = rank, step
        self.places = {unit.name: place for place, unit in enumerate(step.units)}
        if not step.units or not any(s.unit in self.places for s in step.segments):
            raise UsageError(
                "No unit of the model was seen running, so there is nothing to lay out.",
                hint="profile for more steps, with a model of torch.nn modules.",
            )
        self.owner, self.is_backward = self._owners()
        self.count = max(1, step.num_micro_batches)
        traced = rank.traced_step
        if traced is None:
            raise AssertionError("a captured step was traced")
        self.starts = [piece.start_s for piece in cut_step(rank.spans, traced, checkpointing_units(rank))]

    def _owners(self) -> tuple[list[int | None], list[bool]]:
        """By segment: the place of the unit that it counts to (None outside of micro-batches), and whether the micro-batch's
        backward has begun."""
        owners: list[int | None] = []
        backwards: list[bool] = []
        first = next(self.places[s.unit] for s in self.step.segments if s.unit in self.places)
        last, micro_batch, begun = first, None, False
        for segment in self.step.segments:
            if segment.micro_batch is None:
                owners.append(None)
                backwards.append(False)
                continue
            if segment.micro_batch != micro_batch:
                micro_batch, begun, last = segment.micro_batch, False, first
            begun = begun or segment.phase in _BACKWARD
            if segment.unit in self.places:
                last = self.places[segment.unit]
            owners.append(last)
            backwards.append(begun)
        return owners, backwards

    def units(self) -> tuple[CapturedUnit, ...]:
        number = len(self.step.units)
        seconds = [[0.0, 0.0] for _ in range(number)]
        working = [0] * number
        for segment, owner, backward in zip(self.step.segments, self.owner, self.is_backward, strict=True):
            if owner is None:
                continue
            seconds[owner][backward] += segment.duration_s / self.count
            level = segment.passing_gradients
            grown = sum(level.peak.values()) - sum(level.start.values())
            working[owner] = max(working[owner], grown)
        done = self._operators()
        inner: Counter[str] = Counter()
        for item in self.step.inner:
            inner[item.unit] += item.size_bytes
        saved = self._saved_between()
        cuts = self._cuts()
        found = []
        for place, unit in enumerate(self.step.units):
            passes = [
                Pass(
                    seconds=seconds[place][back],
                    flops=sums.flops // self.count,
                    moved_bytes=None if sums.moved_bytes is None else sums.moved_bytes // self.count,
                    num_operators=sums.num_operators // self.count,
                )
                for back, sums in enumerate(done[place])
            ]
            states = self.step.states.get(unit.name)
            again = inner[unit.name] // self.count
            found.append(
                CapturedUnit(
                    name=unit.name,
                    forward=passes[0],
                    backward=passes[1],
                    recompute_s=self.step.recomputable.get(unit.name, 0.0) / (self.count * self.step.repeats),
                    elements=0 if states is None else sum(p.num_elements for p in states.parameters),
                    optimizer_bytes=0 if states is None else states.optimizer_bytes,
                    saved_bytes=again + saved[place] // self.count,
                    again_bytes=again,
                    working_bytes=working[place],
                    cut_bytes=cuts[place][0],
                    no_cut=cuts[place][1],
                )
            )
        return tuple(found)

    def _operators(self) -> list[tuple[_Sums, _Sums]]:
        done = [(_Sums(), _Sums()) for _ in self.step.units]
        last = 0
        for row in sorted(self.rank.operators, key=lambda row: row.start_s):
            if row.phase not in ("forward", *_BACKWARD, "outside"):
                continue
            last = self.places.get(row.unit, last)
            if row.phase != "outside":
                done[last][row.phase in _BACKWARD].add(row)
        return done

    def _saved_between(self) -> Counter[int]:
        """Bytes of tensors between units that autograd keeps, with the first unit that they are kept for."""
        saved: Counter[int] = Counter()
        for tensor in self.step.boundaries:
            keepers = [self.places[name] for name in tensor.saved_until if name in self.places]
            if keepers:
                saved[min(keepers)] += tensor.size_bytes
        return saved

    def _cuts(self) -> list[tuple[int | None, str]]:
        """By unit: the bytes that pass behind it, or None and why the chain cannot be cut there."""
        number = len(self.step.units)
        passing: Counter[int] = Counter()
        blocked: dict[int, str] = {}
        for row in self.rank.storages:
            ends = self._ends(row)
            if ends is None:
                continue
            maker, user = ends
            if user > maker:
                passing[maker] += row.size_bytes
                reason = f"{self.step.units[user].name} uses what {self.step.units[maker].name} has made"
                for between in range(maker + 1, user):
                    blocked.setdefault(between, reason)
        for first, last, name in self._tied():
            for between in range(first, last):
                blocked.setdefault(between, f"{name} is shared by units before and after it")
        cuts: list[tuple[int | None, str]] = []
        for place in range(number):
            if place == number - 1:
                cuts.append((None, "it is the last unit"))
            elif place in blocked:
                cuts.append((None, blocked[place]))
            elif not passing[place]:
                cuts.append((None, "nothing was seen to pass there"))
            else:
                cuts.append((passing[place] // self.count, ""))
        return cuts

    def _ends(self, row: Storage) -> tuple[int, int] | None:
        """The places of the maker and the last user of what a forward makes; None for all else."""
        last_use_s = row.last_forward_use_s
        if row.phase != "forward" or row.category in STATES or last_use_s is None:
            return None
        maker, user = self._place_at(row.birth_s), self._place_at(last_use_s)
        return None if maker is None or user is None else (maker, user)

    def _place_at(self, time_s: float) -> int | None:
        """Of the unit that a moment of a forward counts to; None outside of forwards."""
        position = bisect_right(self.starts, time_s) - 1
        if position < 0 or self.is_backward[position]:
            return None
        return self.owner[position]

    def _tied(self) -> list[tuple[int, int, str]]:
        """First and last place of the units that hold each shared parameter."""
        unit_of = {row.name: row.unit for row in self.rank.parameters}
        held: dict[str, set[int]] = defaultdict(set)
        for row in self.rank.parameters:
            if row.tied_to:
                for name in (row.unit, unit_of.get(row.tied_to, row.unit)):
                    if name in self.places:
                        held[row.tied_to].add(self.places[name])
        return [(min(places), max(places), name) for name, places in held.items() if len(places) > 1]
