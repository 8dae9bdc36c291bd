"""Updated parameters that come in under the next forward are never seen before they are there."""

from __future__ import annotations

import copy
import io
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from memadvisor.engines.sharding import arrivals
from memadvisor.engines.sharding.arrivals import ArrivingParameter
from memadvisor.engines.updates import updates_by_unit
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan

# Ways in which a script reads a weight between the optimizer step and the next forward.
LOOKS = {
    "sum": lambda model: model.head.weight.sum(),
    "data": lambda model: model.head.weight.data.clone(),
    "average": lambda model: torch.zeros_like(model.head.weight).lerp_(model.head.weight, 0.5),
    "list": lambda model: torch._foreach_add([model.head.weight], 1.0)[0],
    "norm": lambda model: torch.nn.utils.get_total_norm(model.parameters()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "state dict": lambda model: model.state_dict()["head.weight"].clone(),
    "copy": lambda model: copy.deepcopy(model).head.weight,
    "copy of one": lambda model: copy.deepcopy(model.head.weight),
    "saved": lambda model: _saved_and_loaded(model),
    "numpy": lambda model: torch.from_numpy(model.head.weight.detach().numpy().copy()),
    "past its module": lambda model: nn.functional.linear(torch.ones(2, 9), model.head.weight),
    "written": lambda model: model.head.weight.data.mul_(0.5).clone(),
    "another forward": lambda model: model(torch.arange(4).view(1, 4)),
}


def _saved_and_loaded(model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(model.head.weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def looks_after_steps(rank: int) -> dict[str, list[torch.Tensor]]:
    """What each way of looking gives, step by step; the last entry are the weights in the end."""
    found = {}
    for name, look in LOOKS.items():
        ddp = build(Training(), rank)
        optimizer = make_optimizer("adamw", ddp)
        data = torch.Generator().manual_seed(rank)
        seen = []
        for _ in range(3):
            words = torch.randint(0, 13, (4, 6), generator=data)
            ddp(words).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(look(ddp.module).detach().clone())
        found[name] = [*seen, nn.utils.parameters_to_vector(ddp.parameters()).detach()]
    return found


def looks_under_plans(rank: int) -> list[dict[str, list[torch.Tensor]]]:
    found = [looks_after_steps(rank)]
    for zero, by_unit in ((1, False), (2, False), (1, True), (3, True)):
        plan = make_plan(dist.get_world_size(), zero, overlap=True, update_by_unit=by_unit)
        with applied(plan):
            found.append(looks_after_steps(rank))
    return found


def test_whatever_the_script_reads_after_a_step_is_what_it_reads_without_a_plan():
    for plain, *plans in run_ranks(looks_under_plans, 2):
        for ours in plans:
            for name in LOOKS:
                for before, after in zip(plain[name], ours[name], strict=True):
                    assert type(after) is type(before), name
                    assert torch.equal(before, after), name


def classes(rank: int) -> tuple[list[bool], list[bool], list[bool]]:
    """Whether parameters are arriving: after the step, after asking for their shapes, and after a forward."""
    with applied(make_plan(dist.get_world_size(), 1, overlap=True)):
        ddp = build(Training(), rank)
        optimizer = make_optimizer("adamw", ddp)
        ddp(torch.arange(4).view(1, 4)).square().mean().backward()
        optimizer.step()
        after_step = _are_arriving(ddp)
        for parameter in ddp.parameters():
            assert (
                isinstance(parameter, nn.Parameter)
                and parameter.requires_grad
                and parameter.shape == parameter.size()
            )
        optimizer.zero_grad()
        after_shapes = _are_arriving(ddp)
        ddp(torch.arange(4).view(1, 4))
        return after_step, after_shapes, _are_arriving(ddp)


def _are_arriving(ddp: nn.Module) -> list[bool]:
    return [type(parameter) is ArrivingParameter for parameter in ddp.parameters()]


def test_parameters_come_in_until_the_forward_and_shapes_are_told_meanwhile():
    for after_step, after_shapes, after_forward in run_ranks(classes, 2):
        assert all(after_step) and all(after_shapes)
        assert not any(after_forward)


def scripted(rank: int) -> list[bool]:
    """A scripted module reads its parameters without asking them."""
    with applied(make_plan(dist.get_world_size(), 1, overlap=True)):
        torch.manual_seed(0)
        ddp = nn.parallel.DistributedDataParallel(nn.Sequential(torch.jit.script(nn.Linear(3, 3))))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return _are_arriving(ddp)


def test_scripted_modules_are_waited_for_at_once():
    for arriving in run_ranks(scripted, 2):
        assert not any(arriving)


KINDS = ("foreach adamw", "adamw", "fused adamw")


def orders(rank: int) -> dict[str, list[str]]:
    """In which order units are updated and begin to be gathered in a step, by optimizer; and with which losses."""
    found = {}
    for kind in KINDS:
        plan = make_plan(dist.get_world_size(), 1, overlap=True, update_by_unit=True)
        with applied(plan):
            found[kind] = _order(kind, rank)
    return found


def _order(kind: str, rank: int) -> list[str]:
    ddp, seen = build(Training(), rank), []
    options = {"fused": True} if kind.startswith("fused") else {"foreach": kind.startswith("foreach")}
    optimizer = torch.optim.AdamW(ddp.parameters(), **options)
    step, begin = updates_by_unit.step_only, arrivals.Arrivals._begin

    def step_only(optimizer, own, slot_of, label):
        step(optimizer, own, slot_of, label)
        seen.extend(
            f"update {unit}" for unit in {slot_of(p).flat.unit for p in ddp.parameters() if id(p) in own}
        )

    def _begin(self, flat):
        seen.append(f"gather {flat.unit}")
        begin(self, flat)

    optimizer.register_step_post_hook(lambda *_: seen.append("script"))
    with (
        mock.patch.object(updates_by_unit, "step_only", step_only),
        mock.patch.object(arrivals.Arrivals, "_begin", _begin),
    ):
        ddp(torch.arange(4).view(1, 4)).square().mean().backward()
        optimizer.step()
    return seen


def test_a_units_new_values_are_on_their_way_while_the_next_unit_is_updated():
    first, *others = run_ranks(orders, 2)
    assert others == [first]
    for kind in KINDS:
        updated = [each.removeprefix("update ") for each in first[kind] if each.startswith("update")]
        assert len(updated) > 2
        in_turns = [f"{what} {unit}" for unit in updated for what in ("update", "gather")]
        assert first[kind] == [*in_turns, "script"], kind
