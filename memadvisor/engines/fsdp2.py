"""FSDP2 as the second executor of a schedule: a script that has called `fully_shard` keeps it, and is told its plan.

What the schedule says of a group is set by FSDPModule's public methods: whether it is freed after the forward, which
groups it gathers ahead, and, on a CPU, our collectives in the place of the backend's. FSDP2's own state is read, to
know its groups and to put back what was there, and not written, but where a group is freed to parts of fewer ranks after
the forward: no method takes the number that `fully_shard` does, so what that has made of it is set again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from memadvisor.engines.activations.recompute import Label, Note
from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.script.live import LiveModel
from memadvisor.engines.script.undo import Undo
from memadvisor.errors import PlanError
from memadvisor.plan import Plan
from memadvisor.plan_checks import beside_fsdp2
from memadvisor.run.cut import innermost
from memadvisor.run.fully_sharded import param_groups
from memadvisor.run.living import living
from memadvisor.schedule import ActionKind, Point, Schedule
from memadvisor.units import counted
from memadvisor.write_schedule import write_schedule


def uses_fsdp2(model: torch.nn.Module) -> bool:
    """Whether the script has called `fully_shard` on the model or on modules of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(module, kind) for module in model.modules())


def is_fsdp2_in_use() -> bool:
    """Whether the script has called `fully_shard` on any module, which may be yet to be called."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and bool(living(kind))


def is_for_fsdp2(plan: Plan, model: torch.nn.Module) -> bool:
    """Whether a plan of several ranks means the script's FSDP2: all do, but one made by hand that asks for no stage, and
    recomputes, moves or rounds something, or updates units one after another."""
    does_something = (
        plan.policy != "none",
        plan.update_by_unit,
        plan.activation_tiers != {"device"},
        plan.optimizer_tiers != {"device"},
        bool(plan.rounded_to),
        bool(plan.optimizer_codes),
    )
    leaves_alone = (
        all(unit.zero_stage == 0 for unit in plan.units) and plan.zero_stage == 0 and any(does_something)
    )
    return uses_fsdp2(model) and not leaves_alone


def attach(
    plan: Plan, model: LiveModel, number: Callable[[], int], label: Label, note: Note, undo: Undo
) -> tuple[LiveModel, Schedule, Fsdp2]:
    """Tell the script's FSDP2 what the plan says, until `undo` runs; what the schedule recomputes is left to do.

    `number` numbers wires. Raises PlanError.
    """
    if plan.prediction is not None and plan.executor != "fsdp2":
        note("warning", "the plan's prediction is for the built-in engine, and the script uses FSDP2")
    groups = read_groups(model.root)
    check_plan_for(plan, model.root, groups)
    model = with_groups(model, groups)
    plan = replace(plan, executor="fsdp2", overlap=False, **_settled(plan, groups))
    schedule = write_schedule(plan, model.rows)
    check_second_runs(model, schedule, groups)
    sharded = Fsdp2(groups, schedule, number, label, undo)
    sharded.report(note)
    return model, schedule, sharded


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The modules that `fully_shard` was called on, by name, and the group that each is gathered in.

    `first` names a group by the first module of those that it was called on at once.
    """

    modules: dict[str, Any]
    first: dict[str, str]

    def of_parameter(self, name: str) -> str | None:
        module = innermost(name, self.modules)
        return None if module is None else self.first[module]


def read_groups(root: torch.nn.Module) -> Groups:
    """Raises PlanError where the model itself is not sharded, but modules inside it are."""
    from torch.distributed.fsdp import FSDPModule

    modules = {name: module for name, module in root.named_modules() if isinstance(module, FSDPModule)}
    if "" not in modules:
        raise PlanError(
            f"The script calls fully_shard on modules inside {type(root).__name__}, and not on the model itself.",
            hint="call fully_shard(model) last, or run without a plan.",
        )
    first: dict[int, str] = {}
    return Groups(modules, {name: first.setdefault(id(_state(m)), name) for name, m in modules.items()})


def check_plan_for(plan: Plan, root: torch.nn.Module, groups: Groups) -> None:
    """Raise PlanError for what FSDP2 does not do, or the script has settled."""
    stages = {unit.zero_stage for unit in plan.units} or {plan.zero_stage}
    if stages != {3}:
        raise PlanError(
            "The script shards its model by FSDP2, which is ZeRO stage 3, and the plan asks for stage "
            f"{min(stages)}.",
            hint="use --zero 3, or make a plan of a profile of this script.",
        )
    is_of_fsdp2 = plan.executor == "fsdp2"
    for what, is_wanted in beside_fsdp2(replace(plan, secondary_ranks=None) if is_of_fsdp2 else plan).items():
        if is_wanted:
            raise PlanError(
                f"The script shards its model by FSDP2, and the plan asks for {what}.",
                hint="tell the script's own fully_shard, or run without a plan.",
            )
    found = _found(groups)
    forward_ranks = getattr(_parts_after_forward(found), "shard_mesh_size", None)
    if is_of_fsdp2 and forward_ranks != plan.secondary_ranks:
        theirs, ours = (
            "shards" if n is None else f"parts of {n} ranks" for n in (forward_ranks, plan.secondary_ranks)
        )
        raise PlanError(
            f"The plan is for parameters that are freed to {ours} after the forward, and the script's FSDP2 frees them to {theirs}.",
            hint="profile this script and advise again.",
        )
    for name, _, group in found:
        mesh = group.mesh_info
        shard_ranks = _shard_ranks(group)
        if shard_ranks == 1:
            raise PlanError(
                f"fully_shard of {name or type(root).__name__!r} shares parameters with no other rank, and there is nothing "
                "that a plan could set.",
                hint="give it a mesh that shards, or run without a plan.",
            )
        num_ranks = shard_ranks * getattr(mesh, "replicate_mesh_size", 1)
        if num_ranks != plan.num_ranks:
            raise PlanError(
                f"The plan is for {counted(plan.num_ranks, 'rank')}, and the script's FSDP2 has {num_ranks}.",
                hint=f"start {counted(plan.num_ranks, 'rank')}, or profile this script and advise again.",
            )
        is_by_hand = not is_of_fsdp2 and plan.shard_ranks is None  # it says nothing of groups
        if shard_ranks != plan.group_ranks and not is_by_hand:
            raise PlanError(
                f"The plan is for shards that {counted(plan.group_ranks, 'rank')} share, and the script's FSDP2 shares "
                f"its shards among {shard_ranks}.",
                hint="profile this script and advise again.",
            )


def check_second_runs(model: LiveModel, schedule: Schedule, groups: Groups) -> None:
    """Raise PlanError where a unit is to run again in a backward without its parameters, since the script has FSDP2 not gather
    them for it."""
    again = {name for stretch in schedule.stretches for name in stretch}
    settings = settings_of(schedule)
    absent = {
        name
        for name, _, group in _found(groups)
        if name in settings and settings[name].reshards and not getattr(group, "unshard_in_backward", True)
    }
    for unit in model.units:
        if unit.row.name in again and unit.row.shard_group in absent:
            raise PlanError(
                f"The plan recomputes {unit.row.name!r}, and the script has told FSDP2 not to gather it for the backward "
                "(set_unshard_in_backward).",
                hint="leave that unit out, profile this script and advise again, or take that call out.",
            )


def _found(groups: Groups) -> list[tuple[str, Any, Any]]:
    """Name, module and parameters of each that has any."""
    named = ((name, module, _param_group(module)) for name, module in groups.modules.items())
    return [(name, module, group) for name, module, group in named if group is not None]


def _settled(plan: Plan, groups: Groups) -> dict[str, Any]:
    """What the script has settled: its mesh; and for a plan that is not of this script whether the model's own group is freed."""
    found = _found(groups)
    if not found:
        return {}
    settled: dict[str, Any] = {"shard_ranks": _shard_ranks(found[0][2])}
    settled["secondary_ranks"] = getattr(_parts_after_forward(found), "shard_mesh_size", None)
    if plan.executor != "fsdp2":
        settled["reshard_model"] = any(
            not name and _reshards(module, group, is_root=True) for name, module, group in found
        )
    return settled


def _parts_after_forward(found: list[tuple[str, Any, Any]]) -> Any:
    """Where parts of fewer ranks are left after the forward (`reshard_after_forward` of a number): the mesh of these. Raises
    PlanError where groups differ in that."""
    freed = [group for name, module, group in found if _reshards(module, group, is_root=not name)]
    near = [group for group in freed if group.post_forward_mesh_info != group.mesh_info]
    if not near:
        return None
    sizes = {group.post_forward_mesh_info.shard_mesh_size for group in freed}
    if len(sizes) > 1:
        raise PlanError(
            "fully_shard frees parameters of some modules to parts of fewer ranks after the forward (reshard_after_forward of a "
            "number), and those of others otherwise.",
            hint="give all of them the same number, or True.",
        )
    return near[0].post_forward_mesh_info


def _free(module: Any, group: Any, frees: bool, near: Any) -> None:
    """Have a group freed after the forward or kept; `near`: to parts of these ranks."""
    module.set_reshard_after_forward(frees, recurse=False)
    if frees and near is not None:
        group.post_forward_mesh_info = near


def _reshards(module: Any, group: Any, *, is_root: bool) -> bool:
    """What the script has of a group; that of the model itself FSDP2 keeps unless it is told otherwise, from its first forward."""
    is_told = not (is_root and _state(module)._auto_reshard_after_forward)
    return group.post_forward_mesh_info is not None and is_told


def _shard_ranks(group: Any) -> int:
    """How many ranks share what is sharded, as the script has it."""
    number: int = getattr(group.mesh_info, "shard_mesh_size", 1)
    return number


def with_groups(model: LiveModel, groups: Groups) -> LiveModel:
    """The same, whose units know their groups."""
    units = []
    for unit in model.units:
        own = {groups.of_parameter(name) for name, _ in unit.parameters}
        units.append(replace(unit, row=replace(unit.row, shard_group=own.pop() if len(own) == 1 else None)))
    return replace(model, units=tuple(units))


@dataclass(frozen=True, slots=True)
class Settings:
    """What a schedule says of one group: whether it is freed after the forward, and whom it gathers ahead."""

    reshards: bool
    forward: tuple[str, ...]
    backward: tuple[str, ...]


def settings_of(schedule: Schedule) -> dict[str, Settings]:
    """By group; "" is the model itself, which begins its forward and the backward."""
    ahead: dict[tuple[bool, str], list[str]] = {}
    released = set()
    order: dict[str, None] = {"": None}
    for boundary, actions in schedule.actions.items():
        is_forward = boundary.point in (Point.FORWARD_BEGINS, Point.BEFORE_FORWARD)
        current = ""
        for action in actions:
            if action.kind is ActionKind.RELEASE and boundary.point in (
                Point.AFTER_FORWARD,
                Point.FORWARD_ENDS,
            ):
                released.add(action.unit)
            elif action.kind is ActionKind.GATHER and not action.overlaps:
                current = action.unit
                order.setdefault(current)
            elif action.kind is ActionKind.GATHER:
                ahead.setdefault((is_forward, current), []).append(action.unit)
    return {
        name: Settings(
            name in released, tuple(ahead.get((True, name), ())), tuple(ahead.get((False, name), ()))
        )
        for name in order
    }


class Fsdp2:
    """FSDP2 of one model under a schedule, until `undo` runs."""

    def __init__(
        self, groups: Groups, schedule: Schedule, number: Callable[[], int], label: Label, undo: Undo
    ) -> None:
        self.groups = groups
        self.settings = settings_of(schedule)
        self.schedule = schedule
        self.is_pairwise = False
        self._undo = undo
        self._wires: dict[dist.ProcessGroup, Wire] = {}
        self._number = number
        self._label = label
        self._has_gradients = True
        self._own_reshards: dict[str, bool] = {}  # of groups that the plan has otherwise
        self._near = _parts_after_forward(_found(groups))
        for place, (name, settings) in enumerate(self.settings.items()):
            module = groups.modules[name]
            self._tell(module, name, settings)
            self._replace_collectives(module, name, place)

    def report(self, note: Note) -> None:
        kept = sum(not settings.reshards for settings in self.settings.values())
        depth = max((len(settings.backward) for settings in self.settings.values()), default=0)
        how = "pairwise collectives through its Comm" if self.is_pairwise else "its own collectives"
        note(
            "info",
            f"FSDP2: {len(self.settings)} groups, of which {kept} keep their parameters until the backward; "
            f"{depth or 'none'} gathered ahead; {how}",
        )

    def follow(self, has_gradients: bool) -> None:
        """Before a forward of the model. One without gradients frees what the script has it free: what is kept for a
        backward that does not come would be whole still where the script looks at its parameters next."""
        if has_gradients == self._has_gradients:
            return
        self._has_gradients = has_gradients
        for name, own in self._own_reshards.items():
            reshards = self.settings[name].reshards if has_gradients else own
            module = self.groups.modules[name]
            _free(module, _param_group(module), reshards, self._near)

    def _tell(self, module: Any, name: str, settings: Settings) -> None:
        state, group = _state(module), _param_group(module)
        forward = [_module(other) for other in state._states_to_forward_prefetch]
        backward = [_module(other) for other in state._states_to_backward_prefetch]
        self._undo.add(lambda: module.set_modules_to_forward_prefetch(forward))
        self._undo.add(lambda: module.set_modules_to_backward_prefetch(backward))
        if group is not None:
            reshards = _reshards(module, group, is_root=module is self.groups.modules[""])
            own = group.post_forward_mesh_info
            near = self._near if own == group.mesh_info else own
            self._undo.add(lambda: _free(module, group, reshards, near))
            if reshards is not settings.reshards:
                self._own_reshards[name] = reshards
            _free(module, group, settings.reshards, self._near)
        named = self.groups.modules
        module.set_modules_to_forward_prefetch([named[name] for name in settings.forward])
        # Without any it gathers the next one ahead by itself; one that is there already is not gathered.
        module.set_modules_to_backward_prefetch([named[name] for name in settings.backward] or [module])

    def _replace_collectives(self, module: Any, name: str, place: int) -> None:
        group = _param_group(module)
        if group is None or group.device.type != "cpu" or self.schedule.is_native:
            return
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as own

        from memadvisor.engines.fsdp2_comm import Gather, Scatter

        gather, scatter = group._all_gather_comm, group._reduce_scatter_comm
        if type(gather) is not own.DefaultAllGather or type(scatter) is not own.DefaultReduceScatter:
            return  # the script's own choice
        wire = self._wire(group.mesh_info.shard_process_group)
        wires = [wire]
        if self._near is not None:
            wires.append(self._wire(self._near.shard_process_group))
        self._undo.add(lambda: module.set_custom_all_gather(gather))
        self._undo.add(lambda: module.set_custom_reduce_scatter(scatter))
        is_ahead = any(name in other.forward + other.backward for other in self.settings.values())
        module.set_custom_all_gather(Gather({w.group: w for w in wires}, name, place, is_ahead, self._label))
        module.set_custom_reduce_scatter(Scatter(wire, name, place, self._label))
        self.is_pairwise = True

    def _wire(self, group: dist.ProcessGroup) -> Wire:
        if group not in self._wires:
            wire = self._wires[group] = Wire(
                group, lambda staging: None, self._number(), algorithms=self.schedule.algorithms
            )
            self._undo.add(wire.close)
        return self._wires[group]


def _state(module: Any) -> Any:
    return module._get_fsdp_state()


def _param_group(module: Any) -> Any:
    """None: all parameters are in groups inside. Raises PlanError for one that has several."""
    groups = param_groups(module)
    if len(groups) > 1:
        raise PlanError(
            f"fully_shard of {type(module).__name__} shards its parameters among several meshes.",
            hint="run without a plan.",
        )
    return groups[0] if groups else None


def _module(state: Any) -> Any:
    return state._modules[0]
