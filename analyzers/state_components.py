"""What of each kind of model state theory has a rank hold, component by component, beside the tensors recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from memadvisor.coded_states import coded_bytes
from memadvisor.cost.owners import SCALARS, is_elementwise
from memadvisor.precision import Precision, bytes_in
from memadvisor.run.records import OptimizerState, Parameter
from memadvisor.run.run import RankRun


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


def own_parameters(rank: RankRun) -> list[Parameter]:
    return [parameter for parameter in rank.parameters if not parameter.tied_to]


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


def parameter_components(
    rank: RankRun, stages: dict[str, int], num_ranks: int, paged: frozenset[str], masters: Precision
) -> list[StateComponent]:
    own = [parameter for parameter in own_parameters(rank) if parameter.unit not in paged]
    return _one_per_dtype("parameter", own, stages, num_ranks, 3, masters)


def gradient_components(
    rank: RankRun, stages: dict[str, int], num_ranks: int, paged: frozenset[str], masters: Precision
) -> list[StateComponent]:
    own = (parameter for parameter in own_parameters(rank) if parameter.unit not in paged)
    trainable = [parameter for parameter in own if parameter.requires_grad]
    return _one_per_dtype("gradient", trainable, stages, num_ranks, 2, masters)


def master_components(
    rank: RankRun, stages: dict[str, int], num_ranks: int, masters: Precision
) -> list[StateComponent]:
    """Those that are kept beside whole parameters."""
    own = [
        p
        for p in own_parameters(rank)
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


def optimizer_components(
    rank: RankRun,
    stages: dict[str, int],
    num_ranks: int,
    away: frozenset[str],
    coded: frozenset[tuple[str, str]],
) -> list[StateComponent]:
    """One row per component and dtype of the optimizer's state, theory beside the tensors recorded; of states that it does
    not know, a row of their own."""
    own = {parameter.name: parameter for parameter in own_parameters(rank)}
    rows: dict[tuple[str, str, bool], list[OptimizerState]] = defaultdict(list)
    for state in rank.optimizer_states:
        owner = own.get(state.parameter)
        stage = 0 if owner is None else stages.get(owner.unit, 0)
        is_known = _is_known(state, owner, is_whole=stage == 0 or _has_owner(state, rank))
        rows[state.component, state.dtype, is_known].append(state)
    found = []
    for (component, dtype, is_known), states in rows.items():
        if is_known:
            row = _known_component(component, dtype, states, own, stages, num_ranks, away, coded)
        else:
            row = _unknown_component(component, dtype, states, own, away)
        found.append(row)
    return [row for row in found if row.num_elements]  # none of it, where all of it is elsewhere


def _has_owner(state: OptimizerState, rank: RankRun) -> bool:
    """Whether a plan gives whole parameters to ranks: of an optimizer that is not told to update each element by itself,
    where the script itself shards nothing."""
    return state.optimizer is not None and not is_elementwise(state.optimizer) and not rank.shard_groups


def _is_known(state: OptimizerState, owner: Parameter | None, *, is_whole: bool) -> bool:
    """Whether it has an element for each of the parameter's, or one in all; of pieces (not `is_whole`) any number of them."""
    if owner is None:
        return True
    return not is_whole or state.num_elements in (1, owner.num_elements)


def _unknown_component(
    component: str,
    dtype: str,
    states: list[OptimizerState],
    own: dict[str, Parameter],
    away: frozenset[str],
) -> StateComponent:
    states = _staying(states, own, away)
    return StateComponent(
        kind="optimizer_state",
        component=component,
        dtype=dtype,
        num_elements=sum(state.num_elements for state in states),
        expected_bytes=None,
        recorded_bytes=sum(state.size_bytes for state in states),
    )


def _staying(
    states: list[OptimizerState], own: dict[str, Parameter], away: frozenset[str]
) -> list[OptimizerState]:
    """Those of no unit whose state is elsewhere."""
    return [s for s in states if s.parameter not in own or own[s.parameter].unit not in away]


def _is_counter(component: str, states: list[OptimizerState], own: dict[str, Parameter]) -> bool:
    """Whether there is one number for each parameter. Of parameters that are one number themselves the name alone tells."""
    if any(state.num_elements > 1 for state in states):
        return False
    owners = [own.get(state.parameter) for state in states]
    return component in SCALARS or any(owner is None or owner.num_elements > 1 for owner in owners)


def _copied(
    states: list[OptimizerState],
    recorded: Mapping[str, OptimizerState],
    own: dict[str, Parameter],
    away: frozenset[str],
) -> list[Parameter]:
    """Parameters in whose place an optimizer has copies, flat in one tensor or one by one: those without a state by their name,
    where states without a name have an element for each of theirs."""
    nameless = sum(state.num_elements for state in states if state.parameter not in own)
    left = [p for name, p in own.items() if p.requires_grad and name not in recorded and p.unit not in away]
    return left if nameless and nameless == sum(parameter.num_elements for parameter in left) else []


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
        states = _staying(states, own, away)
    recorded = {state.parameter: state for state in states}
    num_states = Counter((state.parameter, state.num_elements) for state in states)
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
            for _ in range(max(1, num_states[name, count])):  # several optimizers may have one parameter
                share.add(count, size_bytes, is_sharded=is_sharded)
    for parameter in () if is_counter or any(stages.values()) else _copied(states, recorded, own, away):
        share.add(parameter.num_elements, item_bytes * parameter.num_elements, is_sharded=False)
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
