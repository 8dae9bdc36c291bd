"""What the recorder says of a training, and that it leaves nothing behind."""

import copy
import ctypes
import gc
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

import memadvisor
from memadvisor.analyzers.evaluation import evaluation
from memadvisor.analyzers.step_time import step_time
from memadvisor.capture import owners


def make_model():
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU())  # noqa: E731
    return nn.Sequential(
        nn.Embedding(32, 16), nn.ModuleList([block(), block()])[0], block(), nn.Linear(16, 32)
    )


def train(model, steps=6, accumulate=1, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        for _ in range(accumulate):
            tokens = torch.randint(0, 32, (4, 8))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_and_random_numbers_are_what_they_were_without_us(tmp_path):
    model = make_model()
    plain = train(model)
    after_plain = torch.rand(1)
    model = make_model()
    with memadvisor.profile(tmp_path / "run"):
        profiled = train(model)
        after_profiled = torch.rand(1)

    assert profiled == plain
    assert torch.equal(after_plain, after_profiled)


def global_state():
    """What a profiler could leave changed in the process: hooks, replaced functions, flags, filters, handlers."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    flags = [ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value]
    flags += [ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value]
    hooks = [
        dict(value)
        for module in (torch_module, torch_optimizer)
        for name, value in vars(module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    functions = [
        torch.autograd._engine_run_backward,
        torch.autograd.profiler._prepare_profiler,
        torch.distributed.Work.wait,
        torch.nn.Module.__call__,
        torch.nn.Module._call_impl,
        torch.UntypedStorage.resize_,
        DataLoader.__iter__,
        _BaseDataLoaderIter.__next__,
        sys.excepthook,
        sys.unraisablehook,
    ]
    modes = [torch._C._len_torch_dispatch_stack(), torch._C._autograd._profiler_enabled()]
    saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    filters, finders = list(warnings.filters), list(sys.meta_path)
    return [
        flags,
        hooks,
        functions,
        modes,
        saved_hooks,
        handlers,
        filters,
        finders,
        dict(os.environ),
        gc.callbacks[:],
    ]


def test_nothing_is_left_behind(tmp_path):
    model = make_model()
    modules = [{key: str(value) for key, value in vars(module).items()} for module in model.modules()]
    before = global_state()
    with memadvisor.profile(tmp_path / "run"):
        train(model)
        assert global_state() != before

    assert global_state() == before
    assert [set(vars(module)) for module in model.modules()] == [set(names) for names in modules]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch_module._has_any_global_hook()


def test_steps_micro_batches_and_tokens_are_counted(tmp_path):
    with memadvisor.profile(tmp_path / "run") as prof:
        train(make_model(), steps=5, accumulate=3)
    steps = prof.run.ranks[0].steps

    assert [step.index for step in steps] == [0, 1, 2, 3, 4]
    assert [step.traced for step in steps] == [False, False, True, False, False]
    assert {step.num_micro_batches for step in steps} == {3}
    assert {step.num_tokens for step in steps} == {3 * 4 * 8}
    assert {step.num_samples for step in steps} == {3 * 4}


def test_every_parameter_belongs_to_one_unit_and_units_come_in_order_of_execution(tmp_path):
    with memadvisor.profile(tmp_path / "run") as prof:
        train(make_model(), steps=4)
    rank = prof.run.ranks[0]

    units = [unit.name for unit in rank.units]
    assert units == ["0", "1", "2", "3"]
    assert sum(unit.num_parameters for unit in rank.units) == sum(row.num_elements for row in rank.parameters)
    assert {row.unit for row in rank.parameters} == set(units)


def test_spans_of_units_lie_inside_forward_and_backward(tmp_path):
    with memadvisor.profile(tmp_path / "run") as prof:
        train(make_model(), steps=4)
    spans = [span for span in prof.run.ranks[0].spans if span.step == 3]
    (forward,) = [span for span in spans if span.kind == "forward"]
    (backward,) = [span for span in spans if span.kind == "backward"]

    inner = [span for span in spans if span.kind == "unit_forward"]
    assert {span.unit for span in inner} == {"0", "1", "2", "3"}
    assert all(forward.start_s <= span.start_s <= span.end_s <= forward.end_s for span in inner)
    inner = [span for span in spans if span.kind == "unit_backward"]
    assert {"1", "2", "3"} <= {span.unit for span in inner}
    assert all(backward.start_s <= span.start_s <= span.end_s <= backward.end_s for span in inner)


def test_blocks_behind_reentrant_checkpoints_have_their_backwards(tmp_path):
    """Their first forward has no graph that a hook could wait in: they were told a backward of 0 seconds."""
    block = lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU())  # noqa: E731

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(32, 16)
            self.blocks = nn.ModuleList(block() for _ in range(3))
            self.head = nn.Linear(16, 32)

        def forward(self, tokens):
            x = self.tokens(tokens)
            for each in self.blocks:
                x = checkpoint(each, x, use_reentrant=True)
            return self.head(x)

    with memadvisor.profile(tmp_path / "run") as prof:
        train(Checkpointed(), steps=4)
    spans = [span for span in prof.run.ranks[0].spans if span.step == 3]
    backwards = {span.unit: span for span in spans if span.kind == "unit_backward"}
    again = {span.unit: span for span in spans if span.kind == "unit_recompute"}
    order = [f"blocks.{i}" for i in (2, 1, 0)]

    assert [unit for unit in backwards if unit in order] == order
    assert all(again[unit].end_s <= backwards[unit].start_s < backwards[unit].end_s for unit in order)


def test_parameters_that_are_frozen_for_the_moment_are_trained(tmp_path):
    """Lightning's toggle_optimizer freezes what its other optimizers train: the theory of states left that out."""
    model = nn.ModuleDict({"left": nn.Linear(16, 16), "right": nn.Linear(16, 16), "kept": nn.Linear(16, 16)})
    model["kept"].requires_grad_(False)
    model.forward = lambda x: model["kept"](model["right"](model["left"](x)))
    optimizers = {name: torch.optim.Adam(model[name].parameters()) for name in ("left", "right")}
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            for name, optimizer in optimizers.items():
                for other in optimizers:
                    model[other].requires_grad_(other == name)
                model(torch.randn(4, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    rank = prof.run.ranks[0]

    assert {row.name for row in rank.parameters if row.requires_grad} == {
        f"{unit}.{each}" for unit in optimizers for each in ("weight", "bias")
    }
    assert {unit.name: unit.trainable_bytes for unit in rank.units} == {
        "left": 1088,
        "right": 1088,
        "kept": 0,
    }


def test_parts_of_a_known_model_have_their_forwards_and_evaluations(tmp_path):
    """As of an actor-critic, whose rollouts call the model and whose updates call its parts."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            words = torch.randint(16, (4, 8))
            with torch.no_grad():
                model(words)
                model[0](words)
            x = words
            for part in model:
                x = part(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]
    spans = [span for span in rank.spans if span.step == 3]

    kinds = [span.kind for span in spans if span.kind in ("forward", "evaluation")]
    assert kinds == ["evaluation"] * 2 + ["forward"] * 4
    called = [span for span in spans if span.kind == "unit_forward"][-4:]
    assert [span.unit for span in called] == ["0", "1", "2", "3"]
    assert step_time(rank).by_phase_s["forward"] > 0
    assert evaluation(rank).num_calls == 2 * 3
    assert {(step.num_micro_batches, step.num_samples) for step in rank.steps} == {(1, 4)}


class Coder(nn.Module):
    """Called by its parts alone."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.middle, self.decoder = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def encode(self, x):
        return self.middle(self.encoder(x))


def test_parts_that_are_called_one_by_one_are_one_model(tmp_path):
    model, half_made = Coder(), Coder.__new__(Coder)  # which nobody may ask for its modules
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            x = torch.randn(4, 8)
            F.mse_loss(model.decoder(model.encode(x)), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]

    assert [row.name for row in rank.parameters] == [name for name, _ in model.named_parameters()]
    assert [unit.name for unit in rank.units] == ["encoder", "middle", "decoder"]
    assert {(step.num_micro_batches, step.num_samples) for step in rank.steps} == {(1, 4)}
    assert {row.unit for row in rank.saved} == {"encoder", "middle", "decoder", ""}
    assert not half_made.__dict__


def test_who_makes_models_all_the_time_is_not_searched_for_ever(tmp_path, monkeypatch):
    searches = []
    monkeypatch.setattr(owners, "living_modules", lambda kind: searches.append(kind) or [])
    with memadvisor.profile(tmp_path / "run"):
        for part in [nn.Linear(2, 2) for _ in range(40)]:
            part(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(part.parameters(), lr=0.1).step()
    assert 0 < len(searches) <= 16  # with those for what an optimizer updates


class Solver(nn.Module):
    """Made anew around what it integrates, as torchdiffeq does."""

    def __init__(self, field):
        super().__init__()
        self.field = field

    def forward(self, x):
        return x + self.field(x)


def test_what_is_wrapped_anew_for_each_step_is_one_model_and_keeps_its_parameters(tmp_path):
    field, head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8)
    optimizer = torch.optim.RMSprop([*field.parameters(), *head.parameters()], lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            head(Solver(field)(torch.randn(4, 8))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]

    assert [unit.name for unit in rank.units] == ["field.0", "field.2", "model1"]
    assert sum(row.num_elements for row in rank.parameters) == 3 * 72
    assert {row.module for row in rank.saved} <= {"", "field", "field.0", "field.1", "field.2", "model1"}


def test_copies_of_a_model_for_each_task_have_one_name_and_what_is_trained_is_found(tmp_path):
    """Meta-learning as `higher` does it: only copies are called, whose weights are made of the model's."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.Adam(net.parameters())
    with memadvisor.profile(tmp_path / "run") as prof, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            copied = copy.deepcopy(net)
            for module, source in zip(copied.modules(), net.modules(), strict=True):
                for name, parameter in source.named_parameters(recurse=False):
                    del module._parameters[name]
                    module._parameters[name] = parameter * 1.0
            copied(torch.randn(4, 8)).sum().backward()
            del copied, module
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]

    assert [row.num_elements for row in rank.parameters] == [64, 8, 64, 8]
    assert {row.unit for row in rank.saved} <= {"model1", "model1.0", "model1.2"}
    assert sum(row.size_bytes for row in rank.storages if row.category == "parameter") == 4 * 144


def test_a_model_and_another_that_only_lies_beside_it_stay_two(tmp_path):
    """As a teacher that is not trained, in a module with its pupil."""
    both = nn.ModuleDict({"pupil": nn.Linear(8, 8), "teacher": nn.Linear(8, 8)})
    optimizer = torch.optim.SGD(both["pupil"].parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            x = torch.randn(4, 8)
            F.mse_loss(both["pupil"](x), both["teacher"](x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert [unit.name for unit in prof.run.ranks[0].units] == ["", "model1"]


def test_the_model_states_are_sixteen_bytes_a_parameter(tmp_path):
    """fp32 Adam: 4 parameter + 4 gradient + 8 state, alive when the optimizer steps (and its step counters)."""
    model = make_model()
    with memadvisor.profile(tmp_path / "run") as prof:
        train(model)
    rank = prof.run.ranks[0]
    (optimizer,) = [s for s in rank.spans if s.kind == "optimizer" and s.step == rank.traced_step.index]
    alive = [
        row
        for row in rank.storages
        if row.birth_s <= optimizer.start_s and (row.death_s is None or row.death_s > optimizer.start_s)
    ]
    total = lambda category: sum(row.size_bytes for row in alive if row.category == category)  # noqa: E731
    num_params = sum(p.numel() for p in model.parameters())
    num_tensors = len(list(model.parameters()))

    assert total("parameter") == total("gradient") == 4 * num_params
    assert total("optimizer_state") == 8 * num_params + 4 * num_tensors


def test_a_failure_of_ours_is_one_line_and_the_training_goes_on(tmp_path, monkeypatch, capfd):
    from memadvisor.capture import closed_step

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(closed_step.ClosedStep, "rows", broken)
    with memadvisor.profile(tmp_path / "run"):
        losses = train(make_model())

    assert len(losses) == 6
    assert capfd.readouterr().err.count("memadvisor stopped recording: RuntimeError: planted") == 1
    assert not torch_module._has_any_global_hook()


def test_what_could_not_be_written_at_the_end_is_said_too(tmp_path, capfd):
    with memadvisor.profile(tmp_path / "run") as prof:
        train(make_model())
        os.close(prof._recorder._writer._journal._fd)

    assert capfd.readouterr().err.count("memadvisor stopped recording: OSError") == 1
    assert not torch_module._has_any_global_hook()


def test_the_scripts_own_profiler_takes_precedence(tmp_path):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        train(model, steps=2, optimizer=optimizer)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
            train(model, steps=3, optimizer=optimizer)

    assert any(event.key == "aten::addmm" for event in theirs.key_averages())
    assert any("profiler of its own" in note.text for note in prof.run.ranks[0].notes)
