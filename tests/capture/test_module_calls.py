"""Which modules were called with what, and which operator kept which tensor."""

import torch
from torch import nn

import memadvisor


class Gate(nn.Module):
    """sigmoid keeps its result, the product both factors."""

    def forward(self, x):
        return x * torch.sigmoid(x)


def profiled(model, directory, **inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(directory) as prof:
        for _ in range(4):
            model(torch.randn(8, 16), **inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return prof.run.ranks[0]


def test_a_saved_tensor_names_the_operator_whose_backward_needs_it(tmp_path):
    """Not the one that made it: the product keeps what sigmoid made, and so does sigmoid."""
    rank = profiled(nn.Sequential(nn.Linear(16, 16), Gate(), nn.ReLU()), tmp_path / "run")
    made_by = {row.storage_id: row.operator for row in rank.storages}
    kept = {(row.module, row.operator, made_by[row.storage_id]) for row in rank.saved if row.module != "0"}

    assert kept == {
        ("1", "aten::sigmoid", "aten::sigmoid"),
        ("1", "aten::mul", "aten::addmm"),
        ("1", "aten::mul", "aten::sigmoid"),
        ("2", "aten::relu", "aten::relu"),
    }


def test_calls_nest_and_hand_storages_on(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))
    rank = profiled(model, tmp_path / "run")

    # Measured after the trace, and none of it is in the trace.
    assert rank.process.second_run_call_s is not None
    assert [call.module for call in rank.module_calls] == ["", "0", "1", "1.0", "1.1"]
    assert not [row for row in rank.operators if row.name == "aten::sin"]
    assert [call.takes_last for call in rank.module_calls] == [False, False, True, False, True]
    whole, first, inner, relu, last = rank.module_calls
    assert whole.start_s < first.start_s < first.end_s < inner.start_s < relu.start_s
    assert last.end_s < inner.end_s < whole.end_s
    tensors = {role: {} for role in ("input", "output")}
    for row in rank.call_tensors:
        tensors[row.role][row.call_id] = row.storage_id
    assert tensors["output"][first.call_id] == tensors["input"][inner.call_id]
    assert tensors["output"][relu.call_id] == tensors["input"][last.call_id]
    assert tensors["output"][last.call_id] == tensors["output"][whole.call_id]
    needing = {row.call_id for row in rank.call_tensors if row.needs_gradient}
    assert needing == {inner.call_id, relu.call_id, last.call_id}  # the batch needs none
    assert {row.needs_gradient for row in rank.call_tensors if row.role == "output"} == {None}


def test_a_call_that_writes_into_its_input_says_so(tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    rank = profiled(model, tmp_path / "run")

    changed = {row.call_id for row in rank.call_tensors if row.is_changed}
    assert [call.module for call in rank.module_calls if call.call_id in changed] == ["1"]


def test_what_a_hook_puts_in_the_place_of_an_argument_is_told_from_what_was_there(tmp_path):
    """As FSDP2 casts what a module is called with: such an argument was none, or another storage that had been there."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4).bfloat16(), nn.Flatten())
    model[1].register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    rank = profiled(model, tmp_path / "run")

    dtypes = {row.storage_id: row.dtype for row in rank.storages}
    names = [call.module for call in rank.module_calls]
    late = [(names[t.call_id], dtypes[t.storage_id]) for t in rank.call_tensors if t.role == "late_input"]
    assert late == [("1", "bfloat16")]
    assert [names[t.call_id] for t in rank.call_tensors if t.role == "input"] == ["", "0", "2"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(16, 16)

    def forward(self, x, *, extra):
        with torch.no_grad():
            self.shared(x)
        return self.shared(self.shared(x)) + extra["more"][0]


def test_a_shared_module_has_a_call_each_time_and_none_without_gradients(tmp_path):
    rank = profiled(Twice(), tmp_path / "run", extra={"more": [torch.ones(8, 16)]})

    assert [call.module for call in rank.module_calls] == ["", "shared", "shared"]
    inputs = [row for row in rank.call_tensors if row.call_id == 0 and row.role == "input"]
    assert len(inputs) == 2  # one of them by keyword, inside a dictionary and a list


def test_a_batch_that_was_there_before_the_step_is_an_input_and_a_data_set_is_not(tmp_path):
    """Of a batch that is trained on again and again the whole was "other"."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, data = torch.randn(8, 16), torch.randn(100, 16)
    with memadvisor.profile(tmp_path / "run") as prof:
        for number in range(4):
            (model(batch) + model(data[number : number + 8])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    categories = {row.shape: row.category for row in prof.run.ranks[0].storages if row.phase == "baseline"}

    assert categories["[8, 16]"] == "input"
    assert categories["[100, 16]"] == "other"


class MadeInside(nn.Module):
    """Its activation is a module that each forward makes anew."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.second(nn.SiLU()(self.first(x)))


def test_what_a_module_made_inside_a_forward_keeps_is_of_the_unit_around_it(tmp_path):
    """It was of no unit, and a plan that recomputes the unit was predicted to keep it."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Sequential(*(MadeInside() for _ in range(3))), nn.Linear(8, 1))
    rank = profiled(model, tmp_path / "run")
    kept = [(row.operator, row.unit) for row in rank.saved if row.module == "(SiLU)"]

    assert kept == [("aten::silu", f"1.{block}") for block in range(3)]
