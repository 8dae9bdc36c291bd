"""A recomputed unit keeps its inputs alone; losses stay bitwise those of the plain run."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import sys
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from memadvisor.engines.activations.second_run_cost import measure_second_runs
from memadvisor.engines.apply import apply, install
from memadvisor.engines.script import planned
from memadvisor.engines.script.live import model_fingerprint
from memadvisor.errors import PlanError
from memadvisor.plan import UnitPlan
from tests.engines.trainings import Block, Model, Noted, applied, make_plan


def train_alone(model, steps=10, bf16=False, seed=0, kwargs=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        words = torch.randint(0, 13, (4, 6))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(
                model(words[:, :-1], **(kwargs or {})).flatten(0, 1), words[:, 1:].flatten()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def new_model(**options):
    torch.manual_seed(1)
    return Model(**options)


@pytest.mark.parametrize("policy", ["every-layer", "sqrt"])
@pytest.mark.parametrize("options", [{"dropout": 0.3}, {"batch_norm": True}, {"tied": True, "dropout": 0.1}])
@pytest.mark.parametrize("bf16", [False, True])
def test_losses_weights_and_running_statistics_are_bitwise_equal(policy, options, bf16):
    plain = train_alone(new_model(**options), bf16=bf16)
    with applied(make_plan(1, policy=policy)):
        ours = train_alone(new_model(**options), bf16=bf16)
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])


def test_a_model_that_an_optimizers_closure_calls_first_follows_the_plan():
    """As L-BFGS and skorch have it: the first forward runs inside the first step."""

    def train(steps):
        model = new_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        words = torch.arange(24).reshape(4, 6) % 13

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)]

    plain = train(3)
    with applied(make_plan(1, policy="every-layer")) as plan:
        assert train(3) == plain and plan.is_attached
    with applied(make_plan(1, policy="every-layer")):
        stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        stranger.step(lambda: torch.ones(1))
        with pytest.raises(PlanError, match="before the plan's model"):
            stranger.step(lambda: torch.ones(1))


def saved_bytes(model) -> int:
    sizes = {}

    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros(4, 6, dtype=torch.long))
    return sum(sizes.values())


def test_recomputed_blocks_keep_less():
    model = new_model(dim=32)
    plain = saved_bytes(model)
    with applied(make_plan(1, policy="every-layer")):
        train_alone(model, steps=1)
        assert saved_bytes(model) < plain / 2


class Stateful(torch.nn.Module):
    """A block whose forward uses, and then moves, a buffer: a power iteration, as spectral norm does."""

    def __init__(self, dim=9):
        super().__init__()
        self.linear = torch.nn.Linear(dim, dim)
        self.register_buffer("u", torch.ones(dim))
        self.runs = Noted()

    def forward(self, x):
        self.runs.append(x.shape)
        y = self.linear(x) * self.u.clone()
        with torch.no_grad():
            self.u.mul_(0.9).add_(0.01 * y.detach().mean(0))
        return torch.tanh(y)


def stack(kind, count=3):
    torch.manual_seed(2)
    return torch.nn.Sequential(*[kind() for _ in range(count)])


def regress(model, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        output = model(torch.randn(5, 9))
        loss = (output["y"] if isinstance(output, dict) else output).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def test_buffers_that_a_forward_uses_and_changes():
    plain = regress(stack(Stateful))
    with applied(make_plan(1, policy="every-layer")):
        model = stack(Stateful)
        ours = regress(model)
    assert len(model[0].runs) == 12  # it was recomputed
    assert ours[0] == plain[0]
    assert all(torch.equal(ours[1][name], plain[1][name]) for name in plain[1])


def test_hooks_on_a_recomputed_unit_fire_once():
    calls = []
    with applied(make_plan(1, policy="every-layer")):
        model = stack(Stateful)
        model[1].register_forward_hook(lambda *_: calls.append("after"))
        model[1].register_forward_pre_hook(lambda *_: calls.append("before"))
        regress(model, steps=2)
    assert calls == ["before", "after"] * 2


class Watched(torch.nn.Module):
    """Notes the default device of each of its runs."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(9, 9)
        self.devices = Noted()

    def forward(self, x):
        self.devices.append(torch.get_default_device().type)
        return torch.tanh(self.linear(x))


def test_the_second_run_is_under_the_default_device_of_the_first():
    with applied(make_plan(1, policy="every-layer")):
        model, x = stack(Watched), torch.randn(5, 9)
        with torch.device("meta"):
            output = model(x)
        output.sum().backward()
    assert [list(unit.devices) for unit in model] == [["meta"] * 2] * 3


def test_an_input_that_is_changed_in_place_is_an_error_as_it_is_without_recomputation():
    with applied(make_plan(1, policy="every-layer")):
        model = stack(Watched)
        x = model[0](model(torch.randn(5, 9)))
        output = model[1](x)
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation: an input of '1'"):
            output.sum().backward()


def test_what_a_second_run_costs_is_measured_without_a_trace_in_the_training():
    before = torch.get_rng_state()
    call_s, tensor_s, operator_s = measure_second_runs()
    assert torch.equal(torch.get_rng_state(), before)
    assert call_s + tensor_s > 0 and 1e-7 < operator_s < 1e-3


def test_once_a_model_of_one_rank_is_met_calls_of_modules_have_no_hooks_of_ours():
    hooks = torch.nn.modules.module._global_forward_hooks
    before = len(hooks)
    with applied(make_plan(1, policy="every-layer")):
        assert len(hooks) == before + 1
        regress(stack(Watched), steps=1)
        assert len(hooks) == before


class Checkpointed(torch.nn.Module):
    """The script checkpoints its blocks itself."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(9, 0.2) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy": "every-layer"}, "the policy every-layer recomputes"),
        ({"activation_tier": "disk"}, "the plan's activation_tier moves"),
        ({"activation_bits": 8}, "the plan's activation_bits round"),
    ],
)
def test_what_is_asked_of_blocks_is_told_where_a_model_has_none(options, what):
    for kinds, is_told in ([Stateful, Stateful], False), ([Stateful, torch.nn.Identity], True):
        notes = []
        with applied(make_plan(1, **options), note=lambda level, text, notes=notes: notes.append(text)):
            model = torch.nn.Sequential(*[kind() for kind in kinds])
            model(torch.randn(5, 9)).square().mean().backward()
        told = f"{what} nothing of Sequential: no two modules of one class stand side by side in it"
        assert (told in notes) == is_told


@pytest.mark.parametrize("named", [(), ("0", "1")])
def test_rounding_that_recomputation_leaves_nothing_is_not_put_down_to_a_model_without_blocks(named):
    notes = []
    options = {"policy": "every-layer", "activation_bits": 8, "compressed_units": named}
    with applied(make_plan(1, **options), note=lambda level, text: notes.append(text)):
        model = torch.nn.Sequential(Stateful(), Stateful())
        model(torch.randn(5, 9)).square().mean().backward()
    assert (
        "the plan's activation_bits round nothing of Sequential: the policy every-layer recomputes what they would"
        in notes
    )


def test_units_that_the_script_checkpoints_are_left_alone_with_a_note():
    torch.manual_seed(4)
    plain = regress(Checkpointed())
    notes = []
    with applied(make_plan(1, policy="every-layer"), note=lambda level, text: notes.append(text)):
        torch.manual_seed(4)
        ours = regress(Checkpointed())
    assert ours[0] == plain[0]
    assert sum("the script checkpoints it already" in note for note in notes) == 3


def test_copies_and_pickles_hold_nothing_of_ours():
    with applied(make_plan(1, policy="every-layer")):
        model = new_model()
        train_alone(model, steps=1)
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert all(not module._forward_hooks and "forward" not in vars(module) for module in twin.modules())
    assert train_alone(twin, steps=2)[0] == train_alone(model, steps=2)[0]


def test_a_graph_can_be_walked_twice():
    with applied(make_plan(1, policy="every-layer")):
        model = new_model(batch_norm=True)
        loss = model(torch.zeros(4, 6, dtype=torch.long)).square().mean()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters()]
        loss.backward()
        assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_a_kept_graph_that_has_run_again_can_still_be_walked_for_a_derivative():
    """Each walk has a second run of its own."""
    found = []
    for policy in ("none", "every-layer"):
        torch.manual_seed(3)
        with applied(make_plan(1, policy=policy)):
            model = new_model()
            parameters = list(model.parameters())
            loss = model(torch.zeros(4, 6, dtype=torch.long)).square().mean()
            loss.backward(retain_graph=True)
            slopes = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            (loss + sum(slope.square().sum() for slope in slopes if slope is not None)).backward()
            found.append([p.grad for p in parameters if p.grad is not None])
    assert found[0]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_removing_leaves_classes_and_torch_as_found():
    def names():
        base = torch.optim.Optimizer
        return (
            *(Block.forward, "forward" in vars(Block), torch.autograd._engine_run_backward),
            *(base.state_dict, base.load_state_dict, torch.nn.utils.clip_grad._get_total_norm),
            *(torch.amp.GradScaler._unscale_grads_, torch.distributed.destroy_process_group),
            *(torch.nn.parallel.DistributedDataParallel._ddp_init_helper,),
            *(len(torch.nn.modules.module._global_forward_hooks),),
            *(len(torch.nn.modules.module._global_forward_pre_hooks),),
            *(len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),),
        )

    before = names()
    for plan in (make_plan(1, policy="every-layer"), make_plan(2, 3)):
        found = install(plan)
        if plan.num_ranks == 1:
            train_alone(new_model(), steps=1)
            assert names() != before
        found.remove()
        assert names() == before


def test_apply_on_a_live_model():
    plain = train_alone(new_model(dropout=0.2))
    model = new_model(dropout=0.2)
    found = apply(make_plan(1, policy="every-layer"), model)
    try:
        assert train_alone(model)[0] == plain[0]
    finally:
        found.remove()


class Part(torch.nn.Sequential):
    num_runs = 0

    def forward(self, x):
        Part.num_runs += 1
        return super().forward(x)


class Coder(torch.nn.Module):
    """Called by its parts alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = (
            Part(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2)) for _ in range(2)
        )

    def train_alone(self):
        """Losses, and how often a part ran."""
        optimizer, losses, before = torch.optim.SGD(self.parameters(), lr=0.1), [], Part.num_runs
        torch.manual_seed(0)
        for _ in range(4):
            loss = self.decoder(self.encoder(torch.randn(4, 8))).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, Part.num_runs - before


def test_a_plan_finds_the_model_whose_parts_the_script_calls():
    losses, num_runs = Coder().train_alone()
    model = Coder()
    units = tuple(UnitPlan(name=name, zero_stage=0, recompute=True) for name in ("encoder", "decoder"))
    with applied(make_plan(1, 0, "chosen", units, fingerprint=model_fingerprint(model))):
        assert model.train_alone() == (losses, 2 * num_runs - 1)  # the very first call is under way by then


def test_a_recorder_is_told_of_what_units_keep_for_their_second_runs():
    """Of each unit but the first, whose input is the batch."""
    model = torch.nn.Sequential(*(Part(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
    told = []
    found = apply(
        make_plan(1, policy="every-layer"),
        model,
        label=lambda tensor, category, unit: told.append((tuple(tensor.shape), category)),
    )
    try:
        model(torch.randn(4, 8)).sum().backward()
    finally:
        found.remove()
    assert told == [((4, 8), "activation")] * 2


def test_a_recorder_sees_each_second_run_as_a_call_of_its_unit():
    """The hooks of a module's own call do not fire in it; what a unit's forward computes between its layers is its own."""
    model = torch.nn.Sequential(*(Part(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)))
    seen = []

    @contextlib.contextmanager
    def watch(module):
        seen.append(("begins", module))
        try:
            yield
        finally:
            seen.append(("ends", module))

    found = apply(make_plan(1, policy="every-layer"), model)
    found.recompute.watch = watch
    try:
        loss = model(torch.randn(4, 8)).sum()
        assert seen == []
        loss.backward()
    finally:
        found.remove()
    assert seen == [(what, module) for module in reversed(model) for what in ("begins", "ends")]


def test_a_plan_for_another_model_is_refused_before_the_first_step():
    model = new_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with applied(make_plan(1, policy="every-layer", fingerprint="0" * 16)), pytest.raises(PlanError) as error:
        train_alone(model)
    assert "another model" in error.value.one_line()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_is_none_of_the_plans_is_not_looked_at_for_ever(monkeypatch):
    """Who is around it is searched among all that lives: at each call that took several times a step of Keras."""
    looks = []
    monkeypatch.setattr(planned, "living_modules", lambda kind: looks.append(kind) or [])
    plan = make_plan(1, policy="every-layer", fingerprint=model_fingerprint(new_model()))
    stranger = torch.nn.Linear(3, 3)
    with applied(plan):
        for _ in range(20):
            stranger(torch.zeros(2, 3))
    assert 1 <= len(looks) <= 3


def test_a_plan_for_ranks_is_refused_by_a_process_that_is_none_of_them():
    with applied(make_plan(2, 2)), pytest.raises(PlanError, match="no launcher has started this process"):
        train_alone(new_model())


class Mark(torch.autograd.Function):
    """Passes a tensor on, and has a trace of its step's graph in `marks`."""

    marks: ClassVar[list[weakref.ref[object]]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.mark = type("Mark", (), {})()
        Mark.marks.append(weakref.ref(ctx.mark))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_steps_graph_is_gone_with_the_step_and_not_when_the_garbage_collector_comes():
    """Under Python 3.13 the exception that ends a second run held all frames around it, and they the loss."""
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2))
    )
    Mark.marks.clear()
    gc.collect()
    gc.disable()
    try:
        with applied(make_plan(1, policy="every-layer")):
            for _ in range(3):
                Mark.apply(model(torch.ones(2, 4))).sum().backward()
                assert [mark() for mark in Mark.marks] == [None] * len(Mark.marks)
    finally:
        gc.enable()
    assert len(Mark.marks) == 3
