"""Whose memory what FSDP2 holds is."""

from dataclasses import replace
from types import SimpleNamespace

from memadvisor.cost.allocation_sequence import captured_sequence
from memadvisor.cost.allocator_replay import replay
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings
from memadvisor.cost.fsdp2_memory import Fsdp2Memory, streams_of
from memadvisor.cost.step import StepStorage
from memadvisor.run.parallel_records import ShardGroup
from memadvisor.run.records import Parameter
from memadvisor.schedule import Action, ActionKind, Lane, Point

FORWARD = SimpleNamespace(phase="forward", unit="a", pass_number=0)


def storage(category, stream, birth_s=0.0, death_s=1.0):
    return StepStorage(
        category=category,
        size_bytes=30 * MIB,
        birth_segment=0,
        birth_s=birth_s,
        death_segment=0,
        death_s=death_s,
        stream=stream,
    )


def test_what_was_captured_tells_which_streams_gather_and_reduce():
    storages = [storage("communication", 2), storage("communication", 0), storage("gradient", 1)]
    step = SimpleNamespace(device="cuda:0", storages=storages)
    fsdp2 = SimpleNamespace(executor="fsdp2")

    assert streams_of(step, fsdp2) == {("communication", "output of "): 2, ("gradient", "shards of "): 1}
    assert streams_of(step, SimpleNamespace(executor="engine")) == {}
    assert streams_of(SimpleNamespace(device="cpu", storages=storages), fsdp2) == {}


def test_what_one_stream_has_freed_is_not_given_to_another():
    first, then = storage("temporary", 0), storage("temporary", 0, 2.0, 3.0)
    alone, aside = (
        replay(captured_sequence([first, replace(then, stream=stream)], [FORWARD]), AllocatorSettings())
        for stream in (0, 1)
    )

    assert (alone.peak_reserved_bytes, aside.peak_reserved_bytes) == (30 * MIB, 60 * MIB)
    assert aside.peak_allocated_bytes == alone.peak_allocated_bytes


def test_each_gathered_parameter_and_gradient_is_allocated_by_itself_and_what_travels_as_one():
    """Of three ranks: 4 x 5 elements of float32 are gathered as 6 x 5, and 2 as 3."""
    rows = (
        Parameter("a.weight", "a", "[4, 5]", "float32", 20, 80, True, ""),
        Parameter("a.bias", "a", "[2]", "float32", 2, 8, True, ""),
    )
    group = ShardGroup("a", 3, 1, True, None, None, False, True)
    step = SimpleNamespace(
        device="cuda:0",
        units=[SimpleNamespace(name="a", shard_group="a")],
        states={"a": SimpleNamespace(parameters=rows, trainable_bytes=88)},
        shard_groups=[group],
        segments=[],
        storages=[],
    )
    memory = Fsdp2Memory(step, SimpleNamespace(shard_ranks=3, is_native=True))
    memory.turn(Point.FORWARD_BEGINS)
    memory.act(Action(kind=ActionKind.GATHER, unit="a", lane=Lane.COLLECTIVE))
    memory.leave(SimpleNamespace(gradient_units=("a",)))

    assert memory.tensors() == {
        ("gathered", "a"): 120,
        ("gathered", "a 1"): 12,
        ("communication", "output of a"): 132,
        ("gradient", "a"): 80,
        ("gradient", "a 1"): 8,
    }
    memory.act(Action(kind=ActionKind.REDUCE, unit="a", lane=Lane.COLLECTIVE))
    assert memory.tensors()["gradient", "shards of a"] == 44
    assert sum(memory.held().values()) == sum(memory.tensors().values())
