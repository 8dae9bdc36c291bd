from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from memadvisor.capture.script_shards import shard_groups


@dataclass(frozen=True)
class Policy:
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


BF16 = Policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Sharded(torch.nn.Linear):
    """As `fully_shard` leaves a module: a class that tells its state."""

    def _get_fsdp_state(self):
        return SimpleNamespace(_fsdp_param_groups=[self.group])


def sharded(*policies, after=None, **of_group):
    module = Sharded(2, 2)
    mesh = SimpleNamespace(shard_mesh_size=4, replicate_mesh_size=1)
    parameters = [SimpleNamespace(fsdp_placement=SimpleNamespace(dim=0), mp_policy=each) for each in policies]
    module.group = SimpleNamespace(
        mesh_info=mesh,
        post_forward_mesh_info=after or mesh,
        offload_policy=None,
        modules=(module,),
        fsdp_params=parameters,
        **of_group,
    )
    return shard_groups([("", module)]).get("")


@pytest.mark.parametrize("of_group", [{}, {"mp_policy": BF16}])
def test_a_group_has_its_policy_or_that_of_its_parameters(of_group):
    """Torch 2.15 keeps one of each parameter, torch before it one of the group: without, a model that FSDP2 shares was
    taken for one that tensor parallelism splits."""
    group = sharded(BF16, BF16, **of_group)

    assert (group.num_ranks, group.param_dtype, group.reduce_dtype) == (4, "bfloat16", "float32")
    assert group.is_plain


def test_a_group_tells_whether_its_backward_gathers_it():
    usual, told = sharded(BF16), sharded(BF16, unshard_in_backward=False)

    assert (usual.gathers_in_backward, told.gathers_in_backward) == (True, False)
    assert usual.is_plain and told.is_plain


def test_a_group_tells_how_many_inputs_it_keeps_and_to_how_many_ranks_it_is_freed():
    usual = sharded(BF16)
    told = sharded(
        BF16,
        after=SimpleNamespace(shard_mesh_size=2),
        comm_ctx=SimpleNamespace(reduce_scatter_max_input_buffers=3),
    )

    assert (usual.max_inputs, usual.forward_ranks) == (1, None)
    assert (told.max_inputs, told.forward_ranks, told.is_plain) == (3, 2, True)


def test_modules_of_one_call_are_of_one_group():
    """As torchtitan's norm and output: each was taken for a group of its own."""
    root = torch.nn.Sequential(Sharded(2, 2), Sharded(2, 2))
    mesh = SimpleNamespace(shard_mesh_size=4, replicate_mesh_size=1)
    group = SimpleNamespace(
        mesh_info=mesh, post_forward_mesh_info=mesh, offload_policy=None, modules=tuple(root), fsdp_params=[],
        mp_policy=BF16,
    )  # fmt: skip
    state = SimpleNamespace(_fsdp_param_groups=[group])
    for module in root:
        module._get_fsdp_state = lambda: state

    found = shard_groups([("", root)])

    assert [group.name for group in found.values()] == ["0", "0"]
    assert found["1"].is_plain


def test_a_group_whose_parameters_have_several_policies_is_no_plain_one():
    """Engines and predictions know one for a group."""
    assert not sharded(BF16, Policy()).is_plain
