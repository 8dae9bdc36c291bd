"""What optimizer state of a script's own FSDP2 takes that lies elsewhere, or in codes."""

from types import SimpleNamespace

import pytest

from memadvisor.coded_states import TABLES_BYTES, coded_bytes, scratch_bytes
from memadvisor.cost.fsdp2_states import FetchedShards
from memadvisor.cost.states import ShardState, UnitStates
from memadvisor.schedule import Lane


def unit(name, *counts, given_bytes=0):
    """Of two momenta for each parameter of which this rank has so many elements."""
    items = {
        f"{name}.{place}": (ShardState(size_bytes=4 * count, num_elements=count, is_coded=count >= 100),) * 2
        for place, count in enumerate(counts)
    }
    return UnitStates(
        name=name,
        parameters=(),
        optimizer_bytes=0,
        optimizer_scalar_bytes=8 * sum(counts),
        given_optimizer_bytes=given_bytes,
        shard_items=items,
    )


UNITS = {"a": unit("a", 1000, 10), "b": unit("b", 500, given_bytes=96), "c": unit("c", 250)}
CAPTURED = [4 * count for count in (1000, 10, 500, 250) for _ in range(2)]


def shards(**away):
    step = SimpleNamespace(device="cpu", states=UNITS)
    return FetchedShards(step, SimpleNamespace(offloaded_states=away))


def test_what_lies_on_a_tier_is_not_there_at_rest():
    found = shards(a=Lane.DISK, b=Lane.DISK)

    assert found.resting(CAPTURED) == [1000, 1000]
    assert found.table_bytes == 0 and found.given_bytes == 96
    assert found.coding_bytes("a") == 0


def test_a_parcel_has_its_tensors_where_memory_is_aligned():
    """Of 4,000, 4,000, 40 and 40 bytes, each from the next multiple of 64 on."""
    found = shards(a=Lane.DISK)

    assert found.state_bytes("a") == 4032 + 4032 + 64 + 40
    assert found.state_bytes("c") == 0


def test_two_buffers_take_turns_while_the_optimizer_steps():
    found = shards(a=Lane.DISK, b=Lane.DISK, c=Lane.DISK)

    assert found.buffers() == {}
    found.turn(steps=True)
    assert found.buffers() == {0: found.state_bytes("a"), 1: found.state_bytes("b")}
    found.turn(steps=False)
    assert found.buffers() == {}


def test_what_is_in_codes_rests_as_codes_and_small_tensors_as_they_are():
    found = shards(a=Lane.COMPUTE)

    assert found.resting(CAPTURED) == [40, 40, 1000, 1000, 2000, 2000, *[coded_bytes(1000)] * 2]
    assert found.table_bytes == TABLES_BYTES
    assert found.coding_bytes("a") == scratch_bytes(1000, "cpu")
    assert found.state_bytes("a") == 4032 + 4000


@pytest.mark.parametrize("given", [0, 24])
def test_a_storage_may_be_larger_than_what_it_is_for(given):
    found = shards(c=Lane.DISK)

    assert found.resting([1000 + given, 2000, 1000 + given]) == [2000]
