"""Parameters, gradients and optimizer state: theory beside measured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from memadvisor.analyzers.data_ranks import num_data_ranks, num_splitting
from memadvisor.analyzers.peak import alive_storages
from memadvisor.analyzers.state_components import (
    StateComponent,
    gradient_components,
    master_components,
    optimizer_components,
    own_parameters,
    parameter_components,
)
from memadvisor.coded_states import is_coded
from memadvisor.cost.owners import is_elementwise
from memadvisor.plan import Plan
from memadvisor.policies import resolve_units
from memadvisor.precision import FULL_PRECISION
from memadvisor.run.records import Parameter
from memadvisor.run.run import RankRun
from memadvisor.units import format_bytes

MAX_UNITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates:
    """Bytes of model state alive on this rank's device when the traced step's optimizer step begins.

    Theory (ZeRO, arXiv:1910.02054, section 3): each parameter element has its dtype's bytes as parameter
    and as gradient, and one element of each optimizer component (16 bytes for Adam in float32: 4 + 4 + 8;
    also 16 in classic mixed precision: 2 + 2 + 12). Of a unit at stage s on n ranks a rank holds 1/n of the
    optimizer state from s = 1, of the gradients from s = 2, of the parameters at s = 3. What a plan
    keeps on another tier is none of the device's; what a plan keeps in 8 bits is its codes and scales. With a plan's
    optimizer dtype, masters of narrow parameters are a component of the optimizer's state (s = 1 and 2), or the
    parameters themselves (s = 3), and shards of gradients are in it.
    `padding_bytes` is measured minus expected: alignment, step counters, and whatever theory does not know.
    """

    num_params: int  # tied ones once, frozen ones too
    num_trainable: int
    num_ranks: int  # that share what is sharded
    zero_stages: tuple[int, ...]  # in use, ascending; without a plan (3,) for a script's own FSDP2, else (0,)
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    expected_parameter_bytes: int
    expected_gradient_bytes: int
    expected_optimizer_state_bytes: int
    components: tuple[StateComponent, ...]
    num_splitting: int = (
        1  # ranks that hold parts of one layer (tensor parallelism); counts are of this rank's part
    )
    idle: IdleParameters | None = None
    unused: IdleParameters | None = None
    forgotten: IdleParameters | None = None
    # Of what comes into being behind that moment.
    later_gradient_bytes: int = 0
    later_state_bytes: int = 0

    @property
    def theory_text(self) -> str:
        """What the theory takes the ranks to hold."""
        stages = "/".join(str(stage) for stage in self.zero_stages)
        of_data = (
            f"ZeRO stage {stages} on {self.num_ranks} ranks" if self.num_ranks > 1 else "all on one rank"
        )
        if self.num_splitting == 1:
            return of_data
        shared = f", {of_data}" if self.num_ranks > 1 else ""
        return f"this rank's part of layers split over {self.num_splitting} ranks{shared}"

    @property
    def by_kind(self) -> tuple[tuple[str, int | None, int], ...]:
        """`kind` of components, expected bytes (None where theory says nothing of some) and measured ones."""
        unknown = {row.kind for row in self.components if row.expected_bytes is None}
        figures = (
            ("parameter", self.expected_parameter_bytes, self.parameter_bytes),
            ("gradient", self.expected_gradient_bytes, self.gradient_bytes),
            ("optimizer_state", self.expected_optimizer_state_bytes, self.optimizer_state_bytes),
        )
        return tuple((kind, None if kind in unknown else bytes_, got) for kind, bytes_, got in figures)

    @property
    def theory_bytes(self) -> int | None:
        """Of all states together; None where theory says nothing of some."""
        known = [expected_bytes for _, expected_bytes, _ in self.by_kind if expected_bytes is not None]
        return sum(known) if len(known) == len(self.by_kind) else None

    @property
    def measured_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_state_bytes

    @property
    def expected_bytes(self) -> int:
        return (
            self.expected_parameter_bytes + self.expected_gradient_bytes + self.expected_optimizer_state_bytes
        )

    @property
    def padding_bytes(self) -> int:
        return self.measured_bytes - self.expected_bytes

    @property
    def parameter_bytes_outside(self) -> int:
        """Bytes of parameters in memory that the device's allocator did not give, as weights mapped from a file are.

        0 where parameters are sharded: a rank's own share is not known to the byte.
        """
        if 3 in self.zero_stages:
            return 0
        return max(0, self.expected_parameter_bytes - self.parameter_bytes)

    @property
    def outside_text(self) -> str | None:
        """What a reader must know of such parameters; None where there are none."""
        if not self.parameter_bytes_outside:
            return None
        return (
            f"{format_bytes(self.parameter_bytes_outside)} of parameters are not the allocator's (mapped from a file, or "
            "on another device), and in no peak."
        )

    @property
    def later_text(self) -> str | None:
        """Of a script that updates one model after another, as those that train two against each other do; or of an optimizer's
        first step."""
        without = sum(found.size_bytes for found in (self.idle, self.unused) if found is not None)
        missing = (
            ("gradients", self.expected_gradient_bytes - self.gradient_bytes - without, self.later_gradient_bytes),
            ("optimizer state", self.expected_optimizer_state_bytes - self.optimizer_state_bytes, self.later_state_bytes),
        )  # fmt: skip
        later = [(kind, min(bytes_, born_bytes)) for kind, bytes_, born_bytes in missing]
        told = [f"{format_bytes(bytes_)} of {kind}" for kind, bytes_ in later if bytes_ > 0]
        if not told:
            return None
        return f"{' and '.join(told)} come later in the step: figures are of the moment at which its first update begins."

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of differences from theory."""
        idle = [found.text for found in (self.idle, self.unused, self.forgotten) if found is not None]
        texts = (self.outside_text, self.later_text)
        return (*(text for text in texts if text is not None), *idle)

    @property
    def bytes_per_parameter(self) -> float | None:
        return self.measured_bytes / self.num_params if self.num_params else None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleParameters:
    """Trainable parameters that had no gradient when the first step had ended, and that no optimizer had then.

    A reference model or a teacher that is called under `no_grad` alone. Theory has a gradient for each. With `in_optimizer`:
    those that one had, a head that no loss reaches. They got none in the traced step either, and have no state. With
    `has_gradient`: those that had one, and no optimizer to use it.
    """

    num_elements: int
    size_bytes: int
    units: tuple[str, ...]
    in_optimizer: bool = False
    has_gradient: bool = False

    @property
    def text(self) -> str:
        named = ", ".join(unit or "(root)" for unit in self.units[:MAX_UNITS])
        more = f" and {len(self.units) - MAX_UNITS} more" if len(self.units) > MAX_UNITS else ""
        if self.has_gradient:
            return (
                f"{format_bytes(self.size_bytes)} of parameters ({named}{more}) got gradients, but were in no optimizer as the "
                "first step ended. Give them to one; where they are not to be trained, requires_grad_(False) spares the gradients."
            )
        what = (
            "are trainable and in an optimizer, but got no gradient"
            if self.in_optimizer
            else "are trainable, but got no gradient and are in no optimizer"
        )
        return (
            f"{format_bytes(self.size_bytes)} of parameters ({named}{more}) {what}; theory has gradients for them. "
            "Where they are not to be trained, requires_grad_(False) says so."
        )


def expected_text(expected_bytes: int | None) -> str:
    """What theory says, which may not know."""
    return "not known" if expected_bytes is None else format_bytes(expected_bytes)


def difference_text(expected_bytes: int | None, measured_bytes: int) -> str:
    """What is measured beyond theory, which may not know."""
    if expected_bytes is None:
        return "-"
    difference = measured_bytes - expected_bytes
    return "exact" if difference == 0 else f"{'+' if difference > 0 else ''}{format_bytes(difference)}"


def model_states(rank: RankRun, plan: Plan | None) -> ModelStates | None:
    """Measured and expected model states. None when no step was traced or it had no optimizer step."""
    begins_s = _optimizer_begins_s(rank)
    if begins_s is None or not rank.storages:
        return None
    measured = {"parameter": 0, "gradient": 0, "optimizer_state": 0}
    for storage in alive_storages(rank, begins_s):
        if storage.category in measured:
            measured[storage.category] += storage.size_bytes
    num_ranks = _num_sharing(rank, plan)
    stages = _zero_stages(rank, plan)
    paged = _paged(rank, plan)
    masters = FULL_PRECISION if plan is None else plan.precision
    components = (
        *parameter_components(rank, stages, num_ranks, paged, masters),
        *gradient_components(rank, stages, num_ranks, paged, masters),
        *master_components(rank, stages, num_ranks, masters),
        *optimizer_components(rank, stages, num_ranks, _states_away(rank, plan), _coded(rank, plan)),
    )
    expected = {kind: sum(c.expected_bytes or 0 for c in components if c.kind == kind) for kind in measured}
    own = own_parameters(rank)
    return ModelStates(
        idle=_idle(own),
        unused=_unused(own, rank),
        # What an engine shares out it gives to optimizers as shards of its own.
        forgotten=_forgotten(own, rank) if plan is None else None,
        later_gradient_bytes=_later_bytes(rank, "gradient", begins_s),
        later_state_bytes=_later_bytes(rank, "optimizer_state", begins_s),
        num_params=sum(p.num_elements for p in own),
        num_trainable=sum(p.num_elements for p in own if p.requires_grad),
        num_ranks=num_ranks,
        zero_stages=tuple(sorted(set(stages.values()))) or (0,),
        parameter_bytes=measured["parameter"],
        gradient_bytes=measured["gradient"],
        optimizer_state_bytes=measured["optimizer_state"],
        expected_parameter_bytes=expected["parameter"],
        expected_gradient_bytes=expected["gradient"],
        expected_optimizer_state_bytes=expected["optimizer_state"],
        components=components,
        num_splitting=num_splitting(rank),
    )


def _later_bytes(rank: RankRun, category: str, begins_s: float) -> int:
    return sum(
        row.size_bytes
        for row in rank.storages
        if row.category == category and row.device == rank.process.device and row.birth_s > begins_s
    )


def _idle(own: list[Parameter]) -> IdleParameters | None:
    """Those in no optimizer. None too where no parameter was seen with a gradient in an optimizer: where another keeps
    both, as DeepSpeed does with its masters, the script's own parameters tell nothing."""
    return _found(own, [p for p in own if p.requires_grad and p.in_optimizer is False], in_optimizer=False)


def _unused(own: list[Parameter], rank: RankRun) -> IdleParameters | None:
    """Those in an optimizer. One whose turn the first step was not has a gradient in the traced step, or a state."""
    reached = {(row.unit, _bare(row.shape), row.dtype) for row in rank.storages if row.category == "gradient"}
    updated = {row.parameter for row in rank.optimizer_states}
    unused = [
        p
        for p in own
        if p.requires_grad
        and p.in_optimizer
        and p.name not in updated
        and (p.unit, _bare(p.shape), p.dtype) not in reached
    ]
    return _found(own, unused, in_optimizer=True)


def _forgotten(own: list[Parameter], rank: RankRun) -> IdleParameters | None:
    """Those in no optimizer that have gradients: a head made behind it, a model that is not to be trained. One that has a
    state by the traced step got its optimizer later (pyro makes one for each parameter, at its turn)."""
    updated = {row.parameter for row in rank.optimizer_states}
    outside = [p for p in own if p.requires_grad and p.in_optimizer is False and p.name not in updated]
    return _found(own, outside, in_optimizer=False, has_gradient=True)


def _bare(shape: str) -> str:
    """A bias's gradient is a sum that keeps the dimension it sums over."""
    return shape.removeprefix("[1, ").lstrip("[")


def _found(
    own: list[Parameter], candidates: list[Parameter], *, in_optimizer: bool, has_gradient: bool = False
) -> IdleParameters | None:
    # Of a parameter shared out by elements (FSDP1, use_orig_params=True) a rank may have none, and no gradient of it.
    idle = [p for p in candidates if p.has_gradient is has_gradient and p.num_elements]
    if not idle or not any(p.in_optimizer and p.has_gradient for p in own):
        return None
    return IdleParameters(
        num_elements=sum(p.num_elements for p in idle),
        size_bytes=sum(p.size_bytes for p in idle),
        units=tuple(dict.fromkeys(p.unit for p in idle)),
        in_optimizer=in_optimizer,
        has_gradient=has_gradient,
    )


def _optimizer_begins_s(rank: RankRun) -> float | None:
    step = rank.traced_step
    if step is None:
        return None
    starts = [s.start_s for s in rank.spans if s.step == step.index and s.kind == "optimizer"]
    if rank.process.device != "cpu":  # spans are on the accelerator's timeline, storages on the host's
        starts = [row.start_s for row in rank.operators if row.phase == "optimizer"] or starts
    return min(starts, default=None)


def _num_sharing(rank: RankRun, plan: Plan | None) -> int:
    """How many ranks share what is sharded: in the script's own FSDP2, or as the plan has it."""
    of_script = {group.num_ranks for group in rank.shard_groups}
    if len(of_script) == 1:
        return max(1, of_script.pop())  # a damaged record may say anything
    if plan is not None and rank.process.world_size == plan.num_ranks:
        return plan.group_ranks
    return num_data_ranks(rank)


def _zero_stages(rank: RankRun, plan: Plan | None) -> dict[str, int]:
    """ZeRO stage by unit; without a plan 3 for what the script itself shards by FSDP2, and 0 for the rest."""
    if rank.process.world_size == 1:
        units = () if plan is None else resolve_units(plan, rank.units)
        return {unit.name: 0 for unit in rank.units} | {unit.name: unit.stage_on(1) for unit in units}
    if plan is None:
        return {unit.name: 0 if unit.shard_group is None else 3 for unit in rank.units}
    return {unit.name: unit.zero_stage for unit in resolve_units(plan, rank.units)}


def _paged(rank: RankRun, plan: Plan | None) -> frozenset[str]:
    """Units whose parameters and gradients are elsewhere between their uses."""
    units = () if plan is None else resolve_units(plan, rank.units)
    return frozenset(unit.name for unit in units if unit.parameter_tier != "device")


def _states_away(rank: RankRun, plan: Plan | None) -> frozenset[str]:
    """Units whose optimizer state is elsewhere between updates."""
    units = () if plan is None else resolve_units(plan, rank.units)
    return frozenset(unit.name for unit in units if unit.optimizer_tier != "device")


def _coded(rank: RankRun, plan: Plan | None) -> frozenset[tuple[str, str]]:
    """What is kept in 8 bits between updates: parameters, and components of their state."""
    units = () if plan is None else resolve_units(plan, rank.units)
    coded_units = {unit.name for unit in units if unit.optimizer_bits is not None}
    own = {p.name: p for p in own_parameters(rank) if p.unit in coded_units}
    components: dict[str, set[str]] = defaultdict(set)
    for state in rank.optimizer_states:
        components[state.parameter].add(state.component)
    return frozenset(
        (state.parameter, state.component)
        for state in rank.optimizer_states
        if state.optimizer is None or is_elementwise(state.optimizer)
        if (owner := own.get(state.parameter)) is not None
        and is_coded(state.component, components[owner.name], state.dtype, owner.num_elements)
    )
