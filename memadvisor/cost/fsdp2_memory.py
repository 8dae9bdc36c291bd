"""What torch's FSDP2 holds of parameters and gradients at each moment of a step, of a script that uses it.

From torch/distributed/fsdp/_fully_shard of torch 2.13. A group's parameters are padded, each by itself, to a multiple
of the ranks in its first dimension.

- A gather allocates its output, and then the parameters beside it, which the output is copied to. Without our
  collectives the output of a forward's gather stays until the next one has arrived, or the forward is over; with
  them, and in a backward, it is free as soon as it is copied. One that is gathered ahead has its output alone.
- Gloo's own gather has a copy of the output, its own reduce-scatter one of its input.
- Parameters that are freed to parts of fewer ranks after the forward (`reshard_after_forward` of a number) leave this rank's
  part of each, in the dtype that was gathered, until the backward's gather of them has arrived.
- A group that the script has no backward gather (`set_unshard_in_backward`) stays freed from the forward on.
- Gradients stay as autograd makes them until the group's backward is over. Then the parameters go, the gradients are
  copied to the reduction's input and freed, and this rank's shards come out. The input stays until the next
  group's reduction, or the backward's end (`set_reduce_scatter_max_input_buffers`: until so many are there).
- What the script leaves to the last micro-batch (late_sharding.py) is not done before. Whole gradients that are summed in
  another dtype are in that one from the end of the group's backward on, and later ones are added to them there.
- With groups of ranks that hold the same shards (HSDP) the shards of a sum are summed across them in place. Each group keeps
  the buffer of that until the backward's end: where the gradients are views of it, it is these; where they were there
  before, it is added to them and stays beside them. A script that sums across in the last micro-batch alone
  (`set_requires_all_reduce`) has the shards of the sum so far until then, to which later ones are added.
- On a GPU gathers' outputs are of the memory of the stream that gathers, and shards of gradients of the one that reduces;
  all else is of the one that computes. The caching allocator gives none of a stream's to another.

Shards and optimizer state are as captured, but for units that are updated one after another, as where their state lies
elsewhere or in codes (fsdp2_states.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from memadvisor.cost.activations import View
from memadvisor.cost.fsdp2_sizes import group_bytes, shard_bytes, sharing_ranks
from memadvisor.cost.fsdp2_states import FetchedShards, captured_sizes
from memadvisor.cost.messages import Message
from memadvisor.cost.step import CapturedStep, Segment
from memadvisor.cost.update_shares import UnchangedUpdates, UpdateShares, shares_of_one_by_one
from memadvisor.precision import bytes_in
from memadvisor.schedule import Action, ActionKind, Point, Ranks, Schedule

# Tensors that are of another stream's memory than the one that computes, by how their names begin, and the category of the
# captured ones that tell it.
_ASIDE = (
    ("communication", "output of ", "communication"),
    ("gradient", "shards of ", "gradient"),
    ("communication", "unsummed shards of ", "gradient"),
    ("communication", "summed shards of ", "gradient"),
)


class Fsdp2Memory:
    """The states of one rank while a schedule is played; in the place of EngineMemory."""

    replays = False

    def __init__(self, step: CapturedStep, schedule: Schedule) -> None:
        self.step = step
        self.num_ranks = schedule.shard_ranks
        # Ours are in the place of Gloo's, unless the plan leaves all to it.
        self.is_pairwise = step.device == "cpu" and not schedule.is_native
        self.has_copies = step.device == "cpu" and schedule.is_native  # of Gloo's own
        self.group_of = {unit.name: unit.shard_group for unit in step.units}
        self.groups = group_bytes(step)
        self.gathered: set[str] = set()
        self.stale: set[str] = set()
        start = step.segments[0].captured.start if step.segments else {}
        self._resting = Counter({name: start.get(name, 0) for name in ("parameter", "optimizer_state")})
        self._resting["communication"] = start.get("communication", 0)
        self._fetched = FetchedShards(step, schedule)
        captured = captured_sizes(step, "optimizer_state")
        self._states = self._fetched.resting(captured)
        self._resting["optimizer_state"] += sum(self._states) - sum(captured) - self._fetched.given_bytes
        self._resting["other"] = self._fetched.table_bytes
        self._outputs: set[str] = set()  # of gathers that are ahead
        self._last_output: str | None = None  # of the last gather in a forward
        self._parts: set[str] = set()  # groups freed to parts of fewer ranks
        self._inputs: list[str] = []  # of the last reductions
        self._max_inputs = max((group.max_inputs for group in step.shard_groups), default=1)
        self._whole: set[str] = set()  # units with gradients as autograd made them
        self._cast: set[str] = set()  # units with earlier micro-batches' in the dtype that is summed in
        self._shards: set[str] = set(self.groups) if start.get("gradient") else set()
        self._has_replicas = schedule.shard_ranks < schedule.num_ranks
        self._unsummed: set[str] = set()  # groups with shards that are not summed across groups of ranks yet
        self._summed: set[str] = set()  # with such a sum beside their gradients
        self._is_forward = False
        self.updates = self._updates({*schedule.updated_alone, *self._fetched.away})

    def _updates(self, apart: Collection[str]) -> UpdateShares | UnchangedUpdates:
        """`apart`: units whose shards the script's optimizer updates one after another."""
        if not apart:
            return UnchangedUpdates()
        step, num_ranks = self.step, sharing_ranks(self.step)
        trained_bytes = {
            name: sum(shard_bytes(p, num_ranks[name]) for p in states.parameters if p.requires_grad)
            for name, states in step.states.items()
            if name in num_ranks
        }
        return shares_of_one_by_one(
            trained_bytes, apart=apart, together=step.updates_together, own=step.own_updates
        )

    # ---- what is held --------------------------------------------------------------------------

    def state_bytes(self, name: str) -> int:
        """What is fetched, or expanded, of this rank's state of a unit for its update."""
        return self._fetched.state_bytes(name)

    def has_gradient_away(self, name: str) -> bool:
        return False

    def update_traffic(self, name: str) -> tuple[int, int]:
        return self.state_bytes(name), self.state_bytes(name)

    def coding_bytes(self, name: str) -> int:
        return self._fetched.coding_bytes(name)

    def held(self) -> Counter[str]:
        held = self._resting.copy()
        for (what, _), size_bytes in self._pieces().items():
            held[what] += size_bytes
        held["optimizer_state"] += sum(self._fetched.buffers().values())
        return held

    def tensors(self) -> dict[tuple[str, str], int]:
        pieces = dict(self._constants)
        for (what, where), size_bytes in self._pieces().items():
            pieces |= self._named(what, where, size_bytes)
        for side, size_bytes in self._fetched.buffers().items():
            pieces["fetched optimizer_state", str(side)] = size_bytes
        return {piece: size for piece, size in pieces.items() if size > 0}

    def _named(self, what: str, where: str, size_bytes: int) -> dict[tuple[str, str], int]:
        """One of the pieces as it is allocated."""
        kind = "gathered" if what == "parameter" else what
        sizes = self._allocated.get((what, where), (size_bytes,))
        return {(kind, f"{where} {i}" if i else where): size for i, size in enumerate(sizes)}

    @cached_property
    def _allocated(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """What autograd and FSDP2 allocate parameter by parameter: gathered ones, by group, and whole gradients, by unit."""
        found = {("parameter", name): sizes.parts for name, sizes in self.groups.items()}
        for name, sizes in self.groups.items():
            shares = (size_bytes // self._num_parts(name) for size_bytes in sizes.parts)
            found["parameter", f"parts of {name}"] = tuple(shares)
        return found | {("gradient", name): sizes for name, sizes in self._gradients.items()}

    @cached_property
    def _gradients(self) -> dict[str, tuple[int, ...]]:
        """By unit, in the dtype of what was gathered."""
        dtypes = {group.name: group.param_dtype for group in self.step.shard_groups}
        return {
            name: tuple(
                bytes_in(p.size_bytes, p.dtype, dtypes.get(self.group_of.get(name) or "") or p.dtype)
                for p in states.parameters
                if p.requires_grad
            )
            for name, states in self.step.states.items()
        }

    @cached_property
    def _constants(self) -> dict[tuple[str, str], int]:
        """What rests from step to step, as the pieces that were captured of it, where there are any."""
        own: dict[str, list[int]] = {"optimizer_state": self._states, "other": []}
        pieces: dict[tuple[str, str], int] = {}
        for name, size_bytes in self._resting.items():
            sizes = own[name] if name in own else captured_sizes(self.step, name)
            pieces |= {(f"constant {name}", str(i)): size for i, size in enumerate(sizes or [size_bytes])}
        return pieces

    def _pieces(self) -> dict[tuple[str, str], int]:
        pieces = {("parameter", name): self.groups[name].full for name in self.gathered}
        pieces |= {("communication", f"output of {name}"): self.groups[name].full for name in self._outputs}
        if self._last_output is not None:
            name = self._last_output
            pieces["communication", f"output of {name}"] = self.groups[name].full
        pieces |= {("parameter", f"parts of {name}"): self._part_bytes(name) for name in self._parts}
        pieces |= {("communication", f"input of {name}"): self.groups[name].reduced for name in self._inputs}
        pieces |= {("gradient", name): self._gradient_bytes(name) for name in self._whole}
        pieces |= {("gradient", f"{name}, cast"): self._cast_bytes(name) for name in self._cast}
        pieces |= {("gradient", f"shards of {name}"): self.groups[name].shard for name in self._shards}
        for how, names in (("unsummed", self._unsummed), ("summed", self._summed)):
            pieces |= {("communication", f"{how} shards of {name}"): self.groups[name].sum for name in names}
        return pieces

    def _gradient_bytes(self, unit: str) -> int:
        return sum(self._gradients.get(unit, ()))

    def _cast_bytes(self, unit: str) -> int:
        """Of a unit's whole gradients in the dtype that is summed in."""
        group = self.groups[self.group_of[unit] or ""]
        rows = self.step.states[unit].parameters
        return sum(
            bytes_in(p.size_bytes, p.dtype, group.summed_in or p.dtype) for p in rows if p.requires_grad
        )

    def _part_bytes(self, name: str) -> int:
        return self.groups[name].full // self._num_parts(name)

    def _num_parts(self, name: str) -> int:
        return self.groups[name].forward_ranks or self.num_ranks

    # ---- the step goes on ----------------------------------------------------------------------

    def view(self, segment: Segment) -> View:
        return "own_gradients"

    def enter(self, segment: Segment, *, is_again: bool = False) -> None:
        """Gradients of the step before are gone when the captured ones were, and those of this one are kept."""
        self._fetched.turn(steps=segment.phase == "optimizer")
        if not is_again and not segment.captured.start.get("gradient"):
            self._shards.clear()

    def leave(self, segment: Segment) -> None:
        """Gradients that came in this segment stay until their group is reduced."""
        self._whole.update(unit for unit in segment.gradient_units if self.group_of.get(unit) in self.groups)

    def holds_back(self, action: Action, point: Point, *, is_last: bool) -> bool:
        """Whether an action is left to a later micro-batch. Gradients that are not reduced are cast in its place."""
        if not self.step.late.holds_back(action, point, is_last=is_last):
            return False
        if action.kind is ActionKind.REDUCE and action.shard and self.groups[action.unit].is_summed_apart:
            units = self._reducible(action.unit)
            self._whole.difference_update(units)
            self._cast.update(units)
        return True

    def turn(self, point: Point) -> None:
        """A boundary is reached, whose actions follow: at the ends of the model's forward and of a backward buffers go."""
        if point is Point.FORWARD_BEGINS:
            self._is_forward = True
        elif point is Point.FORWARD_ENDS:
            self._is_forward = False
            self._last_output = None
        elif point in (Point.BEFORE_OPTIMIZER, Point.AFTER_OPTIMIZER):
            self._fetched.turn(steps=point is Point.BEFORE_OPTIMIZER)

    def drop(self, names: Iterable[str]) -> None:
        """A backward is over: what was gathered ahead is not needed, nor what was summed across groups of ranks."""
        self._outputs.difference_update(names)
        self._summed.clear()
        self._inputs.clear()

    def passes(self, action: Action) -> Iterator[dict[tuple[str, str], int]]:
        """The `tensors` that are there while an action is done, one after another: an output beside the last one, then
        without it, then beside the parameters; and a reduction's input beside the gradients, then without them."""
        name, there = action.unit, self.tensors()
        if action.kind is ActionKind.GATHER and not action.overlaps and self._is_absent(name):
            sizes, last = self.groups[name], ("communication", f"output of {self._last_output}")
            there["communication", f"output of {name}"] = sizes.full
            yield there
            without = {piece: size for piece, size in there.items() if piece != last}
            yield without
            yield {**without, **self._named("parameter", name, sizes.full)}
        units = self._reducible(name) if action.kind is ActionKind.REDUCE and action.shard else []
        if sum(map(self._gradient_bytes, units)):
            yield {**there, ("communication", f"input of {name}"): self.groups[name].reduced}
            whole = {piece for unit in units for piece in self._named("gradient", unit, 1)}
            whole |= {("gradient", f"{unit}, cast") for unit in units}
            rest = {piece: size for piece, size in there.items() if piece not in whole}
            yield {**rest, ("communication", f"input of {name}"): self.groups[name].reduced}

    def act(self, action: Action) -> Message | None:
        name = action.unit
        if action.kind is ActionKind.GATHER:
            return self._gather_ahead(name) if action.overlaps else self._gather(name)
        if action.kind is ActionKind.RELEASE:
            return self._release(name, action.ranks)
        if action.kind is ActionKind.REDUCE:
            return self._reduce(name) if action.shard else self._sum_across(name)
        return None

    def _release(self, name: str, ranks: Ranks) -> Message | None:
        is_there = name in self.gathered
        self.gathered.discard(name)
        if not is_there or ranks is not Ranks.SECONDARY:
            return None
        self._parts.add(name)
        sizes = self.groups[name]
        # One parameter after another has its part copied, and is then freed.
        left, highest = sizes.full, 0
        for size_bytes in sizes.parts:
            left += size_bytes // self._num_parts(name)
            highest = max(highest, left)
            left -= size_bytes
        return Message(
            operation="all_gather",
            size_bytes=0,
            staging={"parameter": max(0, highest - self._part_bytes(name))},
        )

    def _gather_ahead(self, name: str) -> Message | None:
        if name in self._outputs or not self._is_absent(name):
            return None
        full = self.groups[name].full
        self._outputs.add(name)
        return Message(
            operation="all_gather",
            size_bytes=full,
            staging={"communication": full if self.has_copies else 0},
        )

    def _is_absent(self, name: str) -> bool:
        """Whether a gather brings a group: it is not there, and the script does not do without it in the backward."""
        is_asked_for = self._is_forward or self.groups[name].gathers_in_backward
        return is_asked_for and name not in self.gathered

    def _gather(self, name: str) -> Message | None:
        if not self._is_absent(name):
            return None
        full, was_ahead = self.groups[name].full, name in self._outputs
        last, self._last_output = self._last_output, None
        last_bytes = 0 if last is None else self.groups[last].full
        part_bytes = self._part_bytes(name) if name in self._parts else 0
        self._outputs.discard(name)
        self._parts.discard(name)
        self.gathered.add(name)
        # The output beside the last one and the backend's copy, and then beside the parameters.
        arriving = last_bytes + full + (full if self.has_copies and not was_ahead else 0)
        highest = max(arriving, 2 * full) + part_bytes
        after = full
        if self._is_forward and not self.is_pairwise:
            self._last_output = name
            after += full
        return Message(
            operation="all_gather",
            size_bytes=0 if was_ahead else full,
            staging={"communication": max(0, highest - after)},
        )

    def _reducible(self, name: str) -> list[str]:
        """Units of a group with gradients as autograd made them."""
        return [unit for unit in self._whole | self._cast if self.group_of.get(unit) == name]

    def _reduce(self, name: str) -> Message | None:
        units = self._reducible(name)
        gradients = sum(self._gradient_bytes(unit) for unit in units)
        if not gradients:
            return None
        cast = self._cast.intersection(units)
        if cast:  # what has come since is added to them first
            gradients = sum(map(self._cast_bytes, cast))
        sizes, before = self.groups[name], self._shards_bytes(name)
        self._whole.difference_update(units)
        self._cast.difference_update(units)
        (self._unsummed if self._has_replicas else self._shards).add(name)
        self._inputs.append(name)
        after = self._shards_bytes(name)
        copied = gradients + before
        # The backend's copy is free again before the sum is cast.
        reduced = before + sizes.sum + max(self.has_copies * sizes.reduced, sizes.is_cast * sizes.shard)
        staging = max(copied, reduced) - after
        category = "gradient" if copied >= reduced else "communication"
        return Message(
            operation="reduce_scatter", size_bytes=sizes.reduced, staging={category: max(0, staging)}
        )

    def _shards_bytes(self, name: str) -> int:
        sizes = self.groups[name]
        return (name in self._shards) * sizes.shard + (name in self._unsummed) * sizes.sum

    def _sum_across(self, name: str) -> Message | None:
        if name not in self._unsummed:
            return None
        sizes = self.groups[name]
        self._unsummed.discard(name)
        if name in self._shards or sizes.is_cast:
            self._summed.add(name)
        self._shards.add(name)
        return Message(operation="all_reduce", size_bytes=sizes.sum, staging={})

    # ---- reductions and updates, as EngineMemory has them ----------------------------------------

    @property
    def must_end_scattering(self) -> bool:
        return len(self._inputs) >= self._max_inputs

    def end_scattering(self) -> str | None:
        return self._inputs.pop(0) if self._inputs else None

    def is_reducing(self, name: str) -> bool:
        return False

    def spend(self, name: str) -> None:
        raise AssertionError("FSDP2 updates in the optimizer step")


def streams_of(step: CapturedStep, schedule: Schedule) -> Mapping[tuple[str, str], int]:
    """Streams whose memory tensors are, by how their names begin: those of the captured ones of their category that most
    are of. What is not there is of the stream that computes.
    """
    if schedule.executor != "fsdp2" or step.device == "cpu":
        return {}
    streams = {}
    for kind, begin, captured in _ASIDE:
        seen = Counter(item.stream for item in step.storages if item.category == captured and item.stream)
        streams[kind, begin] = seen.most_common(1)[0][0] if seen else 0
    return streams
