"""Averages and target networks are told from all else that a script holds beside its model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import memadvisor
from memadvisor.capture.models import Models
from memadvisor.capture.weight_copies import weight_copies


def _network():
    return torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 4))


def _bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def _traced(tmp_path, model, after_step):
    """Storages of a step that `after_step` ends."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            model(torch.randn(8, 30)).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                after_step()
            optimizer.zero_grad()
    return prof.run.ranks[0].storages


def _copies(storages):
    return [row for row in storages if row.category == "weight_copy"]


def _in_module(model):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    return averaged, lambda: averaged.update_parameters(model)


def _in_copy_with_gradients_on(model):
    averaged = copy.deepcopy(model)

    def update():
        for own, other in zip(averaged.parameters(), model.parameters(), strict=True):
            own.lerp_(other, 0.1)

    return averaged, update


def _in_list(model):
    shadow = [parameter.detach().clone() for parameter in model.parameters()]
    own = list(model.parameters())
    return shadow, lambda: torch._foreach_lerp_(shadow, own, 0.1)


def _in_state_dictionary(model):
    best = copy.deepcopy(model.state_dict())
    return best, lambda: None


@pytest.mark.parametrize(
    ("kept", "has_buffers"),
    [(_in_module, True), (_in_copy_with_gradients_on, True), (_in_list, False), (_in_state_dictionary, True)],
)
def test_averages_have_a_category_of_their_own(tmp_path, kept, has_buffers):
    """They were other, like a data set that the script holds in memory."""
    model = _network()
    held, update = kept(model)
    storages = _traced(tmp_path, model, update)
    running = [buffer for buffer in model.buffers() if buffer.dim()]
    expected_bytes = _bytes_of(model.parameters()) + (_bytes_of(running) if has_buffers else 0)
    found = _copies(storages)

    assert sum(row.size_bytes for row in found if row.shape != "[]") == expected_bytes
    assert {row.phase for row in found} == {"baseline"}
    assert {row.module for row in found} == (
        {f"({type(held).__name__})"} if has_buffers and _is_module(held) else {""}
    )


def _is_module(held):
    return isinstance(held, torch.nn.Module)


def test_a_wrapper_that_holds_the_model_beside_its_average_has_copies_of_it_alone(tmp_path):
    model = _network()
    around = torch.nn.ModuleDict({"online": model, "average": copy.deepcopy(model)})
    storages = _traced(tmp_path, model, lambda: None)

    assert sum(row.size_bytes for row in _copies(storages) if row.shape != "[]") == _bytes_of(
        tensor for tensor in around["average"].state_dict().values() if tensor.dim()
    )
    assert sum(row.size_bytes for row in storages if row.category == "parameter") == _bytes_of(
        model.parameters()
    )


class Distribution(torch.nn.Module):
    """Has a buffer beside its network, and is never called itself."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.register_buffer("scale", torch.ones(30))

    def log_prob(self, inputs):
        return self.network(inputs * self.scale)


def test_the_state_that_is_kept_of_what_is_around_the_model_is_a_copy_of_it(tmp_path):
    """As the best state so far of a normalizing flow, whose network alone is called as a module."""
    around = Distribution(_network())
    best = copy.deepcopy(around.state_dict())
    optimizer = torch.optim.SGD(around.parameters(), lr=0.01)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            around.log_prob(torch.randn(8, 30)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = _copies(prof.run.ranks[0].storages)
    assert sum(row.size_bytes for row in found) == _bytes_of(best.values())


def test_a_momentum_that_the_script_keeps_in_a_list_is_no_copy(tmp_path):
    model = _network()
    momentum = [torch.zeros_like(parameter) for parameter in model.parameters()]

    def update():
        for own, parameter in zip(momentum, model.parameters(), strict=True):
            own.mul_(0.9).add_(parameter.grad)

    assert _copies(_traced(tmp_path, model, update)) == []


def test_gradients_of_the_step_before_in_a_variable_are_no_copies(tmp_path):
    model = _network()
    kept = []

    def update():
        kept[:] = [parameter.grad.clone() for parameter in model.parameters()]

    assert _copies(_traced(tmp_path, model, update)) == []


def test_a_measure_of_each_weights_importance_is_no_copy(tmp_path):
    """AdaLoRA keeps three of them by name, EWC one."""
    model = _network()
    importance = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}

    def update():
        for name, parameter in model.named_parameters():
            importance[name].mul_(0.5).add_((parameter * parameter.grad).abs())

    assert _copies(_traced(tmp_path, model, update)) == []


def test_a_layer_that_is_as_large_as_one_of_the_models_by_chance_is_no_copy(tmp_path):
    layer = torch.nn.Linear(30, 30)

    assert _copies(_traced(tmp_path, _network(), lambda: layer)) == []


def test_masters_that_an_optimizer_updates_are_no_copies(tmp_path):
    model = _network()
    masters = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    second = torch.optim.SGD(masters, lr=0.1)

    assert _copies(_traced(tmp_path, model, lambda: second)) == []


def test_copies_of_what_is_shared_among_ranks_are_found_without_a_word_to_these():
    """A rank may be alone in having them: the others would not answer. Rows of shared tensors were asked for, which gathers
    them."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        model = fully_shard(_network(), mesh=init_device_mesh("cpu", (2,)))
        models = Models()
        models.discover(model, [])
        average = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        whole = [torch.zeros(parameter.shape) for parameter in model.parameters()]
        with CommDebugMode() as told:
            found = {id(tensor) for tensor in weight_copies(models)}
    finally:
        dist.destroy_process_group()

    assert found == {id(tensor) for tensor in average.values()}
    assert found.isdisjoint(map(id, whole))
    assert told.get_total_counts() == 0


class _Elsewhere(torch.Tensor):
    """As a late tensor of ZeRO stage 3: whoever looks at its values asks the other ranks."""

    num_asked = 0

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.num_asked += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*(each.as_subclass(torch.Tensor) if isinstance(each, cls) else each for each in args))


def test_values_that_other_ranks_may_have_are_not_asked_for():
    """A state dictionary whose values the script keeps under ZeRO stage 3: both ranks hung where the traced step began."""
    model = _network()
    models = Models()
    models.discover(model, [])
    state = [each.clone().as_subclass(_Elsewhere) for each in model.state_dict().values()]
    _Elsewhere.num_asked = 0

    assert not {id(each) for each in weight_copies(models)} & set(map(id, state))
    assert _Elsewhere.num_asked == 0
