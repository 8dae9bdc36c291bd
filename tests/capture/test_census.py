"""What is alive at a boundary is found behind every kind of tensor."""

from types import SimpleNamespace

import pytest
import torch

import memadvisor
from memadvisor.capture import census
from memadvisor.capture.allocator import DeviceBlock, workspace_sizes
from memadvisor.capture.census import optimizer_state_rows, residents, what_is_elsewhere
from memadvisor.capture.cpu_account import open_cpu_account
from memadvisor.capture.models import Models
from memadvisor.capture.tensor_storage import is_on
from memadvisor.run.records import CUBLAS, CUBLAS_LT


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensors_values_and_places_are_alive(layout):
    """A graph's adjacency that a script made before its steps was unexplained: it has no storage of its own."""
    matrix = torch.eye(1000).to_sparse(layout=layout)
    values = matrix._values() if layout is torch.sparse_coo else matrix.values()
    found = {row.address: row for row in residents((), torch.device("cpu"))}
    other = {row.address for row in residents([(matrix, "parameter", "a")], torch.device("cpu")) if row.unit}

    assert found[values.untyped_storage().data_ptr()].size_bytes == 4000
    assert len(other) == (2 if layout is torch.sparse_coo else 3)


def test_what_the_allocator_does_not_know_is_not_alive():
    """Another thread let it go while the census looked around: "other" was 16 B, and unexplained -16 B."""
    cpu = torch.device("cpu")
    gone, weight = torch.zeros(1_000_000), torch.zeros(1000)
    addresses = {tensor: tensor.untyped_storage().data_ptr() for tensor in (gone, weight)}
    account = open_cpu_account(
        (row.address, row.size_bytes) for row in residents((), cpu) if row.address not in addresses.values()
    )
    if account is None:
        pytest.skip("this build of torch does not tell its CPU total")
    found = {row.address for row in residents([(weight, "parameter", "a")], cpu, account)}
    account.close(found)

    assert addresses[gone] not in found
    assert addresses[weight] in found


def test_cublas_workspaces_are_named_by_their_size(monkeypatch):
    """No tensor names them: every training on a GPU had 8 to 32 MiB unexplained for each thread that multiplies."""
    blocks = {0x100: DeviceBlock(1024, 1000), 0x200: DeviceBlock(2048, 2000), 0x300: DeviceBlock(4096, None)}
    blocks[0x400] = DeviceBlock(1024, 1024)
    monkeypatch.setattr(census, "workspace_sizes", lambda device: {1000: CUBLAS_LT, 2000: CUBLAS})
    found = residents((), torch.device("meta"), None, blocks)

    assert [(row.address, row.size_bytes, row.category, row.operator) for row in found if row.operator] == [
        (0x100, 1024, "other", "cuBLASLt workspace"),
        (0x200, 2048, "other", "cuBLAS workspace"),
    ]


def test_workspaces_of_a_torch_that_cannot_be_asked_are_as_large_as_its_sources_say(monkeypatch):
    """torch 2.11 on an H200, measured: 32 MiB for each thread that multiplies, and 1 MiB for cuBLASLt beside it."""
    for name in ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize"):
        monkeypatch.delattr(torch._C, name, raising=False)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda", 0)

    assert workspace_sizes(device) == {2**25: CUBLAS, 2**20: CUBLAS_LT}
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "64")
    assert workspace_sizes(device) == {(2 * 4096 + 16 * 8) * 2**10: CUBLAS, 2**16: CUBLAS_LT}


def test_what_a_module_of_no_training_holds_carries_its_class():
    """Averaged weights, in no step of which a call was seen, were nobody's: as much as all parameters of the model."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    known = [(parameter, "parameter", "0") for parameter in model.parameters()]
    rows = {row.address: row for row in residents(known, torch.device("cpu"))}

    def said_of(tensors):
        found = [rows[tensor.untyped_storage().data_ptr()] for tensor in tensors]
        return {(row.category, row.unit, row.holder) for row in found}

    assert said_of([*averaged.parameters(), *averaged.buffers()]) == {("other", "", "(AveragedModel)")}
    assert said_of(model.parameters()) == {("parameter", "0", "")}


def test_the_gradient_of_a_batch_that_nobody_has_asked_for_is_alive():
    """Torch alone knows it, until somebody asks: after a penalty on the gradient of a batch it was unexplained."""
    batch = torch.randn(30, 30, requires_grad=True)
    before = {row.address for row in residents((), torch.device("cpu"))}
    batch.square().sum().backward()
    found = [row for row in residents((), torch.device("cpu")) if row.address not in before]

    assert [(row.size_bytes, row.category) for row in found if row.shape == "[30, 30]"] == [(3600, "other")]


class Momentum:
    """A script's own, and no optimizer of torch's: its state is under the parameters, as fastai has it."""

    def __init__(self, model):
        self.state = {
            parameter: {"momentum": torch.zeros_like(parameter)} for parameter in model.parameters()
        }
        self.by_id = {
            id(parameter): parameter for parameter in self.state
        }  # with the hashes of its parameters

    @torch.no_grad()
    def step(self):
        for parameter in self.by_id.values():
            state = self.state[parameter]
            parameter -= 0.1 * state["momentum"].mul_(0.9).add_(parameter.grad)
            parameter.grad = None


def test_state_that_a_script_keeps_by_parameters_is_an_optimizers(tmp_path):
    """It was other, and of no module: of fastai's Adam twice the parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    momentum = Momentum(model)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(5):
            model(torch.randn(4, 30)).square().sum().backward()
            momentum.step()
    state = [row for row in prof.run.ranks[0].storages if row.category == "optimizer_state"]

    assert {row.unit for row in state} == {"0", "1"}
    assert sum(row.size_bytes for row in state) == sum(parameter.nbytes for parameter in model.parameters())


class Outer(torch.optim.Optimizer):
    """As SAM: what it holds of each parameter is the inner optimizer's, and something of its own."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.state = inner.state

    def step(self):
        self.inner.step()


@pytest.mark.parametrize("is_outer_first", [True, False])
def test_state_that_two_optimizers_show_counts_once_as_the_outer_ones(is_outer_first):
    """The momentum of SAM's base optimizer was twice as large as its parameters."""
    weight = torch.nn.Parameter(torch.ones(1000))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    outer = Outer(inner)
    weight.grad = torch.ones(1000)
    outer.step()
    other = torch.optim.SGD([weight], lr=0.1, momentum=0.9)  # with a momentum of its own
    other.step()
    pair = [outer, inner] if is_outer_first else [inner, outer]

    rows = optimizer_state_rows(Models(), [*pair, other])

    assert [(row.component, row.num_elements) for row in rows] == [("momentum_buffer", 1000)] * 2
    assert [row.optimizer.rsplit(".", 1)[1] for row in rows] == ["Outer", "SGD"]


def test_memory_is_that_of_one_gpu_and_says_so():
    """What lay on another one was counted against the first one's total: 188 MiB of 176 were "unexplained", less than none."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    on_first, on_second = (SimpleNamespace(device=device) for device in (first, second))
    alone, both = (
        SimpleNamespace(parameters=lambda given=given: [("", "", each) for each in given])
        for given in ([on_first], [on_first, on_second])
    )

    assert is_on(on_first, first)
    assert not is_on(on_second, first)
    assert is_on(on_second, torch.device("cuda"))
    assert what_is_elsewhere(alone, first) is None
    assert (
        what_is_elsewhere(both, first)
        == "The model lies on cuda:0 and cuda:1: memory is that of cuda:0 alone."
    )
