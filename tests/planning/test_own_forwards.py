"""Units with a forward of the script's own are in no plan: the engine does nothing around their calls."""

import contextlib
import gc
import types

import pytest
import torch
from torch import nn

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.capture.module_info import module_infos
from memadvisor.errors import UsageError
from memadvisor.planning.advise import advise
from memadvisor.planning.paging import may_page


def replaced(block):
    block.forward = types.MethodType(lambda self, x: type(self).forward(self, x), block)


def made_by_compiler(block):
    block[1] = torch.compile(nn.Sequential(nn.Tanh()), backend="eager")


def profiled(directory, change):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(16, 1))
    change(model[1])
    return trained(model, directory, lambda: model(torch.randn(512, 16)))


def trained(model, directory, forward):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with memadvisor.profile(directory, trace_step=1) as prof:
        for _ in range(3):
            forward().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run


def test_a_unit_whose_forward_is_replaced_is_recomputed_in_no_plan(tmp_path):
    run = profiled(tmp_path / "run", replaced)
    step = captured_step(run)
    advice = advise(run, memory_bytes=step.peak_bytes * 7 // 10)

    assert set(step.recomputable) == {"0", "2"}
    assert [module.name for module in run.ranks[0].modules if module.is_own_forward] == ["1"]
    assert not any({"1"} & {*found.plan.recomputed_units, *found.plan.parted_units} for found in advice.plans)
    assert any("a forward of its own in place of that of 1, " in note for note in advice.notes)


class Each(nn.Module):
    """Calls what is inside for one sample at a time."""

    def __init__(self):
        super().__init__()
        self.whole, self.seq = (
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x):
        return self.whole(x) + torch.vmap(self.seq)(x)


def test_what_torch_func_transforms_is_recomputed_by_itself_in_no_plan(tmp_path):
    """A state-space model's plan took 41 % more than predicted: nothing is done around what vmap calls."""
    model = nn.Sequential(*[Each() for _ in range(3)], nn.Linear(16, 1))
    run = trained(model, tmp_path / "run", lambda: model(torch.randn(512, 16)))
    step = captured_step(run)
    choices = [each for options in step.parted.values() for each in (*options.lower, *options.sparing)]
    parts = {name for each in choices for modules in each.modules for name in modules}

    transformed = {call.module for call in run.ranks[0].module_calls if call.is_transformed}
    assert transformed == {f"{n}.seq{inside}" for n in range(3) for inside in ("", ".0", ".1", ".2", ".3")}
    assert "1.whole" in parts and parts.isdisjoint(transformed)
    assert set(step.recomputable) == {"0", "1", "2"}


def test_a_unit_that_torch_func_transforms_is_in_no_plan(tmp_path):
    blocks = [nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(3)]
    model = nn.ModuleList(blocks)
    run = trained(
        model, tmp_path / "run", lambda: model[2](torch.vmap(model[1])(model[0](torch.randn(512, 16))))
    )
    step = captured_step(run)
    advice = advise(run, memory_bytes=step.peak_bytes * 7 // 10)

    assert set(step.recomputable) == {"0", "2"}
    assert any("The script calls 1 inside a transform of torch.func" in note for note in advice.notes)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        (replaced, {"1"}),
        (lambda block: block.compile(backend="eager"), {"1"}),
        (made_by_compiler, {"1.1._orig_mod", "1.1._orig_mod.0"}),
        (lambda block: None, set()),
    ],
)
def test_forwards_that_no_engine_wraps(change, own):
    """What torch.compile has made of a module is one that it does, though its forward is its own."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    change(blocks[1])
    infos = [info for _, info in module_infos(nn.Sequential(*blocks), "", {})]

    assert {info.name for info in infos if info.is_own_forward} == own


@pytest.mark.parametrize(("is_compiled", "holder"), [(False, ""), (True, "torch.compile")])
def test_parameters_of_a_model_that_is_compiled_as_a_whole_stay_where_they_are(tmp_path, is_compiled, holder):
    """Such plans were advised, and run refuses them. A compiled block inside is another matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    called = torch.compile(model, backend="eager") if is_compiled else model
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            called(torch.randn(512, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    step = captured_step(prof.run)

    assert step.holder == holder
    assert may_page(step, 1) is not is_compiled
    del called
    gc.collect()


class Whole(nn.Sequential):
    """A class of the script's: torch's own are left as they are by Dynamo."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [Whole, nn.Sequential])
def test_a_model_that_is_compiled_in_place_is_in_no_plan(tmp_path, kind):
    """`run` refuses them all: no hook of modules fires in its calls. Such plans were advised."""
    torch.manual_seed(0)
    model = kind(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            model(torch.randn(512, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    refused = pytest.raises(UsageError, match=r"compiles Whole in place .* seen\.")

    with refused if kind is Whole else contextlib.nullcontext():
        advise(prof.run, memory_bytes=captured_step(prof.run).peak_bytes * 7 // 10)
    del model
    gc.collect()
