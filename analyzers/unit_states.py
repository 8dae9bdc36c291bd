"""What the model's states take in the step that was captured: of each unit, and what is of no unit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from memadvisor.coded_states import is_coded
from memadvisor.cost.owners import SCALARS, is_elementwise
from memadvisor.cost.states import ShardState, UnitStates, WholeUpdate
from memadvisor.plan import PlannedModel
from memadvisor.run.records import Parameter, Step, Storage, Unit
from memadvisor.run.run import RankRun


def planned_units(rank: RankRun, models: Sequence[PlannedModel]) -> tuple[Unit, ...]:
    """The units of these models; all that there are where none is named."""
    names = {model.name for model in models}
    return tuple(unit for unit in rank.units if not names or unit.model in names)


def unit_states(rank: RankRun, step: Step, units: Sequence[Unit]) -> dict[str, UnitStates]:
    """Parameters and optimizer state of each of these units of a rank in its traced step, and of those that have no row,
    which hold parameters too."""
    others = {unit.name for unit in rank.units} - {unit.name for unit in units}
    parameters: dict[str, list[Parameter]] = {unit.name: [] for unit in units}
    for parameter in rank.parameters:
        if not parameter.tied_to and parameter.unit not in others:
            parameters.setdefault(parameter.unit, []).append(parameter)
    by_name = {p.name: p for p in rank.parameters}
    state_bytes: Counter[str] = Counter()
    scalar_bytes: Counter[str] = Counter()
    whole_bytes: Counter[tuple[str, str]] = Counter()  # by parameter and optimizer
    items: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    shard_items: dict[str, list[ShardState]] = defaultdict(list)
    sharded = {unit.name for unit in rank.units if unit.shard_group is not None and rank.shard_groups}
    components: dict[str, set[str]] = defaultdict(set)
    for state in rank.optimizer_states:
        components[state.parameter].add(state.component)
    for state in rank.optimizer_states:
        owner = by_name.get(state.parameter)
        if owner is None:
            continue
        if state.optimizer is not None and not is_elementwise(state.optimizer):
            whole_bytes[owner.name, state.optimizer] += state.size_bytes
            continue
        whole = state.num_elements == owner.num_elements and owner.num_elements > 1
        (state_bytes if whole else scalar_bytes)[owner.unit] += state.size_bytes
        may_be_coded = is_coded(state.component, components[owner.name], state.dtype, owner.num_elements)
        if whole:
            items[owner.name].append((state.size_bytes // state.num_elements, may_be_coded))
        elif owner.unit in sharded and state.component not in SCALARS and state.num_elements:
            shard = ShardState(
                size_bytes=state.size_bytes, num_elements=state.num_elements, is_coded=may_be_coded
            )
            shard_items[owner.name].append(shard)
    mapped_bytes = _mapped_parameters(rank, step)
    given_bytes = _given_beyond(rank, step)
    return {
        name: UnitStates(
            name=name,
            parameters=tuple(rows),
            optimizer_bytes=state_bytes[name],
            optimizer_scalar_bytes=scalar_bytes[name],
            mapped_bytes=mapped_bytes.get(name, 0),
            given_parameter_bytes=given_bytes["parameter", name],
            given_optimizer_bytes=given_bytes["optimizer_state", name],
            whole_updates=tuple(
                WholeUpdate(parameter=by_name[parameter], optimizer=optimizer, state_bytes=size_bytes)
                for (parameter, optimizer), size_bytes in whole_bytes.items()
                if by_name[parameter].unit == name
            ),
            state_items={row.name: tuple(items[row.name]) for row in rows if row.name in items},
            shard_items={row.name: tuple(shard_items[row.name]) for row in rows if row.name in shard_items},
        )
        for name, rows in parameters.items()
    }


def _at_start(rank: RankRun, step: Step) -> Iterator[Storage]:
    """What was alive when the step began."""
    for row in rank.storages:
        if row.device == rank.process.device and row.birth_s <= step.start_s:
            yield row


def _kept(rank: RankRun, step: Step) -> Iterator[Storage]:
    """What was alive through the step."""
    return (row for row in _at_start(rank, step) if row.death_s is None)


def _mapped_parameters(rank: RankRun, step: Step) -> dict[str, int]:
    """Bytes of parameters that the allocator did not give, by unit; empty unless each of them is known to be of one unit.
    Those that are given other memory in the step (`p.data = ...`) had the allocator's before it."""
    missing = Counter(dict.fromkeys((p.unit for p in rank.parameters), 0))
    for parameter in rank.parameters:
        missing[parameter.unit] += 0 if parameter.tied_to else parameter.size_bytes
    for row in _at_start(rank, step):
        if row.category == "parameter":
            missing[row.unit] -= row.size_bytes
    return {} if min(missing.values(), default=0) < 0 else dict(missing)


def _given_beyond(rank: RankRun, step: Step) -> Counter[tuple[str, str]]:
    """By category and unit, what a GPU's allocator gave for states beyond what they are."""
    given: Counter[tuple[str, str]] = Counter()
    if rank.process.device == "cpu":
        return given  # whose allocator gives what it is asked for
    units = {p.name: p.unit for p in rank.parameters}
    for row in _kept(rank, step):
        given[row.category, row.unit] += row.size_bytes
    for parameter in rank.parameters:
        given["parameter", parameter.unit] -= 0 if parameter.tied_to else parameter.size_bytes
    for state in rank.optimizer_states:
        given["optimizer_state", units.get(state.parameter, "")] -= state.size_bytes
    return +given


def constant_states(rank: RankRun, step: Step, states: Mapping[str, UnitStates]) -> dict[str, int]:
    """Parameter and optimizer bytes that were alive through the step, but belong to no parameter of these units; and those of
    communication buffers (DDP's)."""
    alive: Counter[str] = Counter()
    for row in _kept(rank, step):
        alive[row.category] += row.size_bytes
    alive["parameter"] -= sum(each.given_parameter_bytes for each in states.values())
    alive["optimizer_state"] -= sum(each.given_optimizer_bytes for each in states.values())
    counted = {p.name: p.size_bytes for p in rank.parameters if not p.tied_to and p.unit in states}
    listed = {
        "parameter": sum(counted.values()),
        "optimizer_state": sum(s.size_bytes for s in rank.optimizer_states if s.parameter in counted),
    }
    kept = {category: max(0, alive[category] - known) for category, known in listed.items()}
    return {**kept, "communication": alive["communication"]}
