"""What a rank has of parameters that tensor parallelism splits, alone and below FSDP2; in one process of a made-up group."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import memadvisor
from memadvisor.capture.script_shards import shard_groups
from memadvisor.capture.tensor_parallel import num_data_dims, own_shape, tensor_parallel
from memadvisor.run.parallel_records import TensorParallel

NUM_RANKS = 4
SPLIT = {"0": ColwiseParallel(), "1": RowwiseParallel()}


@contextlib.contextmanager
def ranks():
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def shapes(model):
    groups = shard_groups([("", model)])
    return {
        name: tuple(own_shape(parameter, num_data_dims(name, parameter, groups)))
        for name, parameter in model.named_parameters()
    }, tensor_parallel([("", model)], groups)


def layers():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))


def test_a_rank_has_its_part_of_split_layers():
    with ranks():
        model = parallelize_module(layers(), init_device_mesh("cpu", (NUM_RANKS,)), SPLIT)
        assert shapes(model) == (
            {"0.weight": (4, 8), "0.bias": (4,), "1.weight": (8, 4), "1.bias": (8,)},
            [TensorParallel("", NUM_RANKS)],
        )


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_nothing_of_what_fsdp2_shares_among_groups_of_ranks_is_split(num_replicas):
    """One replica is a dimension of the mesh too."""
    with ranks():
        sizes = (num_replicas, NUM_RANKS // num_replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        model = fully_shard(layers(), mesh=mesh)
        (group,) = shard_groups([("", model)]).values()
        assert (group.num_replicas, group.num_ranks) == sizes
        assert shapes(model) == (
            {"0.weight": (16, 8), "0.bias": (16,), "1.weight": (8, 16), "1.bias": (8,)},
            [],
        )


def test_what_fsdp2_shards_counts_whole_and_only_the_rest_is_split():
    with ranks():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(layers(), mesh["tp"], SPLIT)
        fully_shard(model, mesh=mesh["dp"])
        assert shapes(model) == (
            {"0.weight": (8, 8), "0.bias": (8,), "1.weight": (8, 8), "1.bias": (8,)},
            [TensorParallel("", 2)],
        )


@pytest.mark.parametrize("share", [lambda model: fully_shard(model), lambda model: model])
def test_models_that_only_data_parallelism_shares_are_whole(share):
    with ranks():
        model = share(layers())
        assert shapes(model) == ({name: tuple(p.shape) for name, p in layers().named_parameters()}, [])


def test_a_mesh_named_after_data_is_no_tensor_parallelism():
    """As scripts have it that shard parameters by themselves."""
    with ranks():
        model, mesh = layers(), init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("fsdp",))
        for layer in model:
            layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
        assert tensor_parallel([("", model)], {}) == []


def profiled(directory, activation):
    """One rank of a layer, its activation and another layer, both split."""
    with ranks():
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), activation, torch.nn.Linear(16, 8))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (NUM_RANKS,)), plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(32, 8)
        with memadvisor.profile(directory, trace_step=1) as prof:
            for _ in range(3):
                model(batch).sum().backward()
                optimizer.step()
    return prof.run.ranks[0]


def test_what_autograd_keeps_of_split_layers_is_this_ranks_part(tmp_path):
    """A DTensor has no memory of its own: what it wraps is kept."""
    rank = profiled(tmp_path, torch.nn.GELU())
    operators = {storage.storage_id: storage.operator for storage in rank.storages}
    kept = {(operators[row.storage_id], row.size_bytes) for row in rank.saved}
    assert ("aten::gelu", 32 * 4 * 4) in kept


def test_what_is_kept_by_itself_and_inside_of_a_dtensor_is_held_by_autograd_alone(tmp_path):
    """The output of tanh, and of attention: taken for the script's own, it was said to outlive its unit's second forward."""
    rank = profiled(tmp_path, torch.nn.Tanh())
    (output,) = (row for row in rank.storages if row.operator == "aten::tanh")
    assert len([row for row in rank.saved if row.storage_id == output.storage_id]) == 2
    backward_s = min(span.start_s for span in rank.spans if span.kind == "backward" and span.step == 1)
    assert output.last_held_s is None or output.last_held_s < backward_s
