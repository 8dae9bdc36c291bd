"""Parameters, gradients and optimizer state: theory beside measured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from memadvisor.analyzers.data_ranks import num_data_ranks, num_splitting
from memadvisor.analyzers.peak import alive_storages
from memadvisor.coded_states import coded_bytes, is_coded
from memadvisor.cost.owners import is_elementwise
from memadvisor.plan import Plan
from memadvisor.policies import resolve_units
from memadvisor.precision import FULL_PRECISION, Precision, bytes_in
from memadvisor.run.records import OptimizerState, Parameter
from memadvisor.run.run import RankRun
from memadvisor.units import format_bytes

# Of torch.optim: one number for each parameter, however large that is.
_COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComponent:
    """One kind of model state in one dtype: `parameter`, `gradient`, or a key of the optimizer's state.

    `expected_bytes` is the theory's: 0 of what has one number for each parameter (step counters), and None of what it does
    not know: states that have not an element for each of the parameter's (factored ones, another library's 8 bits).
    `recorded_bytes` is the sum over the optimizer's own tensors of this component; None for parameters,
    gradients and an engine's masters, which are measured as storages alone.
    """

    kind: str  # "parameter", "gradient" or "optimizer_state"
    component: str
    dtype: str
    num_elements: int  # of the full model, or of the tensors recorded where theory is silent
    expected_bytes: int | None
    recorded_bytes: int | None


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
    def bytes_per_parameter(self) -> float | None:
        return self.measured_bytes / self.num_params if self.num_params else None


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
        *_parameters(rank, stages, num_ranks, paged, masters),
        *_gradients(rank, stages, num_ranks, paged, masters),
        *_masters(rank, stages, num_ranks, masters),
        *_optimizer_states(rank, stages, num_ranks, _states_away(rank, plan), _coded(rank, plan)),
    )
    expected = {kind: sum(c.expected_bytes or 0 for c in components if c.kind == kind) for kind in measured}
    own = _own_parameters(rank)
    return ModelStates(
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


def _optimizer_begins_s(rank: RankRun) -> float | None:
    step = rank.traced_step
    if step is None:
        return None
    starts = [s.start_s for s in rank.spans if s.step == step.index and s.kind == "optimizer"]
    if rank.process.device != "cpu":  # spans are on the accelerator's timeline, storages on the host's
        starts = [row.start_s for row in rank.operators if row.phase == "optimizer"] or starts
    return min(starts, default=None)


def _own_parameters(rank: RankRun) -> list[Parameter]:
    return [parameter for parameter in rank.parameters if not parameter.tied_to]


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
    own = {p.name: p for p in _own_parameters(rank) if p.unit in coded_units}
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


class _Share:
    """Bytes of a component, whole units and shards apart, so that shards are divided once, rounded up."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._whole_bytes = self._shared_bytes = 0
        self.num_elements = 0

    def add(self, num_elements: int, size_bytes: int, *, is_sharded: bool) -> None:
        self.num_elements += num_elements
        if is_sharded:
            self._shared_bytes += size_bytes
        else:
            self._whole_bytes += size_bytes

    @property
    def expected_bytes(self) -> int:
        return self._whole_bytes - (-self._shared_bytes // self._num_ranks)


def _parameters(
    rank: RankRun, stages: dict[str, int], num_ranks: int, paged: frozenset[str], masters: Precision
) -> list[StateComponent]:
    own = [parameter for parameter in _own_parameters(rank) if parameter.unit not in paged]
    return _one_per_dtype("parameter", own, stages, num_ranks, 3, masters)


def _gradients(
    rank: RankRun, stages: dict[str, int], num_ranks: int, paged: frozenset[str], masters: Precision
) -> list[StateComponent]:
    own = (parameter for parameter in _own_parameters(rank) if parameter.unit not in paged)
    trainable = [parameter for parameter in own if parameter.requires_grad]
    return _one_per_dtype("gradient", trainable, stages, num_ranks, 2, masters)


def _masters(
    rank: RankRun, stages: dict[str, int], num_ranks: int, masters: Precision
) -> list[StateComponent]:
    """Those that are kept beside whole parameters."""
    own = [
        p
        for p in _own_parameters(rank)
        if p.requires_grad and stages.get(p.unit, 0) in (1, 2) and masters.of_optimizer(p.dtype) != p.dtype
    ]
    found = _one_per_dtype("optimizer_state", own, stages, num_ranks, 1, masters)
    return [replace(component, component="master") for component in found]


def _one_per_dtype(
    kind: str,
    parameters: list[Parameter],
    stages: dict[str, int],
    num_ranks: int,
    sharded_from: int,
    masters: Precision,
) -> list[StateComponent]:
    """Shards of what the optimizer updates are in its dtype."""
    shares: dict[str, _Share] = {}
    for p in parameters:
        is_sharded = stages.get(p.unit, 0) >= sharded_from
        dtype = masters.of_optimizer(p.dtype) if is_sharded and p.requires_grad else p.dtype
        share = shares.setdefault(dtype, _Share(num_ranks))
        share.add(p.num_elements, bytes_in(p.size_bytes, p.dtype, dtype), is_sharded=is_sharded)
    return [
        StateComponent(
            kind=kind,
            component=kind,
            dtype=dtype,
            num_elements=share.num_elements,
            expected_bytes=share.expected_bytes,
            recorded_bytes=None,
        )
        for dtype, share in shares.items()
    ]


def _optimizer_states(
    rank: RankRun,
    stages: dict[str, int],
    num_ranks: int,
    away: frozenset[str],
    coded: frozenset[tuple[str, str]],
) -> list[StateComponent]:
    """One row per component and dtype of the optimizer's state, theory beside the tensors recorded; of states that it does
    not know, a row of their own."""
    own = {parameter.name: parameter for parameter in _own_parameters(rank)}
    rows: dict[tuple[str, str, bool], list[OptimizerState]] = defaultdict(list)
    for state in rank.optimizer_states:
        owner = own.get(state.parameter)
        is_whole = owner is not None and stages.get(owner.unit, 0) == 0
        sizes = (1,) if owner is None else (1, owner.num_elements)
        is_known = not is_whole or state.num_elements in sizes
        rows[state.component, state.dtype, is_known].append(state)
    found = []
    for (component, dtype, is_known), states in rows.items():
        if is_known:
            row = _known_component(component, dtype, states, own, stages, num_ranks, away, coded)
        else:
            row = _unknown_component(
                component, dtype, [s for s in states if own[s.parameter].unit not in away]
            )
        found.append(row)
    return [row for row in found if row.num_elements]  # none of it, where all of it is elsewhere


def _unknown_component(component: str, dtype: str, states: list[OptimizerState]) -> StateComponent:
    return StateComponent(
        kind="optimizer_state",
        component=component,
        dtype=dtype,
        num_elements=sum(state.num_elements for state in states),
        expected_bytes=None,
        recorded_bytes=sum(state.size_bytes for state in states),
    )


def _is_counter(component: str, states: list[OptimizerState], own: dict[str, Parameter]) -> bool:
    """Whether there is one number for each parameter. Of parameters that are one number themselves the name alone tells."""
    if any(state.num_elements > 1 for state in states):
        return False
    owners = [own.get(state.parameter) for state in states]
    return component in _COUNTERS or any(owner is None or owner.num_elements > 1 for owner in owners)


def _known_component(
    component: str,
    dtype: str,
    states: list[OptimizerState],
    own: dict[str, Parameter],
    stages: dict[str, int],
    num_ranks: int,
    away: frozenset[str],
    coded: frozenset[tuple[str, str]],
) -> StateComponent:
    is_counter = _is_counter(component, states, own)
    if not is_counter:
        states = [s for s in states if s.parameter not in own or own[s.parameter].unit not in away]
    recorded = {state.parameter: state for state in states}
    item_bytes = max((s.size_bytes // s.num_elements for s in states if s.num_elements), default=0)
    share = _Share(num_ranks)
    for name, parameter in () if is_counter else own.items():
        if parameter.unit in away:
            continue
        is_sharded = stages.get(parameter.unit, 0) >= 1
        state = recorded.get(name)
        is_whole = state is not None and state.num_elements == parameter.num_elements
        # A rank holds pieces of sharded parameters, of some of them none; theory wants its share of each.
        if parameter.requires_grad and (is_sharded or is_whole):
            count = parameter.num_elements
            size_bytes = coded_bytes(count) if (name, component) in coded else item_bytes * count
            share.add(parameter.num_elements, size_bytes, is_sharded=is_sharded)
    return StateComponent(
        kind="optimizer_state",
        component=component,
        dtype=dtype,
        num_elements=share.num_elements or sum(state.num_elements for state in states),
        expected_bytes=share.expected_bytes,
        recorded_bytes=sum(
            coded_bytes(state.num_elements)
            if (state.parameter, component) in coded and not is_counter
            else state.size_bytes
            for state in states
        ),
    )
