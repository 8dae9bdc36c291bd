"""Whose memory what FSDP2 holds is."""

from dataclasses import replace
from types import SimpleNamespace

from memadvisor.cost.allocation_sequence import captured_sequence
from memadvisor.cost.allocator_replay import replay
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings
from memadvisor.cost.fsdp2_memory import streams_of
from memadvisor.cost.step import StepStorage

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
