"""Whose memory what FSDP2 holds is."""

from dataclasses import replace
from types import SimpleNamespace

from memadvisor.cost.allocation_events import StepEvents
from memadvisor.cost.allocation_log import AllocationLog
from memadvisor.cost.allocation_sequence import captured_sequence
from memadvisor.cost.allocator_replay import replay
from memadvisor.cost.allocator_settings import MIB, AllocatorSettings
from memadvisor.cost.fsdp2_memory import Fsdp2Memory, streams_of
from memadvisor.cost.late_sharding import NOTHING_LATE, LateSharding
from memadvisor.cost.own_updates import OwnUpdates
from memadvisor.cost.step import StepStorage
from memadvisor.run.parallel_records import ShardGroup
from memadvisor.run.records import Parameter
from memadvisor.schedule import Action, ActionKind, Lane, Point, Ranks

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

    assert streams_of(step, fsdp2) == {
        ("communication", "output of "): 2,
        ("gradient", "shards of "): 1,
        ("communication", "unsummed shards of "): 1,
        ("communication", "summed shards of "): 1,
    }
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


GATHER_A = Action(kind=ActionKind.GATHER, unit="a", lane=Lane.COLLECTIVE)
REDUCE_A = Action(kind=ActionKind.REDUCE, unit="a", lane=Lane.COLLECTIVE, shard=True, ranks=Ranks.INSIDE)
SUM_A = replace(REDUCE_A, shard=False, ranks=Ranks.ACROSS)


def memory_of_groups(
    *names,
    num_replicas=1,
    reduce_dtype=None,
    param_dtype=None,
    late=NOTHING_LATE,
    updated_alone=(),
    **of_groups,
):
    """Each of two parameters, on three ranks, or on so many groups of three."""
    units = {
        name: (
            Parameter(f"{name}.weight", name, "[4, 5]", "float32", 20, 80, True, ""),
            Parameter(f"{name}.bias", name, "[2]", "float32", 2, 8, True, ""),
        )
        for name in names
    }
    step = SimpleNamespace(
        device="cuda:0",
        units=[SimpleNamespace(name=name, shard_group=name) for name in names],
        states={name: SimpleNamespace(parameters=rows, trainable_bytes=88) for name, rows in units.items()},
        shard_groups=[
            ShardGroup(name, 3, num_replicas, True, param_dtype, reduce_dtype, False, True, **of_groups)
            for name in names
        ],
        late=late,
        segments=[],
        storages=[],
        updates_together=True,
        own_updates=OwnUpdates(),
    )
    schedule = SimpleNamespace(
        shard_ranks=3,
        num_ranks=3 * num_replicas,
        is_native=True,
        updated_alone=updated_alone,
        offloaded_states={},
    )
    return Fsdp2Memory(step, schedule)


def test_units_that_are_updated_one_after_another_have_what_an_update_of_their_shards_makes():
    """Of four units alike: all at once, each by itself, and two of them, after which the others are updated at once."""
    at_once, apart, some = (
        memory_of_groups(*"abcd", updated_alone=names).updates for names in ("", "abcd", "ab")
    )

    assert (at_once.late_temporaries(800, 0), at_once.late_time()) == (1, 1)
    assert (apart.late_temporaries(800, 0), apart.late_time(), apart.time(("a",))) == (1 / 4, 0, 1 / 4)
    assert (some.late_temporaries(800, 0), some.late_time()) == (1 / 2, 1 / 2)


def test_a_gather_has_its_output_beside_the_last_one_and_then_beside_the_parameters():
    memory = memory_of_groups("a", "b")
    memory.turn(Point.FORWARD_BEGINS)
    memory.act(replace(GATHER_A, unit="b"))
    before = sum(memory.tensors().values())
    message = memory_of_groups("a", "b").act(GATHER_A)
    totals = [sum(tensors.values()) - before for tensors in memory.passes(GATHER_A)]
    memory.act(GATHER_A)

    assert totals == [132, 0, 132]
    assert sum(memory.tensors().values()) - before == 132
    assert message.size_bytes == 132
    assert not list(memory.passes(GATHER_A))  # it is there


def test_a_reduction_has_its_input_beside_the_gradients_and_the_shards_without_them():
    memory = memory_of_groups("a")
    memory.leave(SimpleNamespace(gradient_units=("a",)))
    whole, alone = memory.passes(REDUCE_A)
    message = memory.act(REDUCE_A)

    assert sum(whole.values()) == 88 + 132 == sum(memory.held().values()) + sum(message.staging.values())
    assert alone == {("communication", "input of a"): 132}
    assert memory.tensors() == {**alone, ("gradient", "shards of a"): 44}


def backward(memory, *actions):
    """What is held of shards after each of the actions, and when the backward is over."""
    memory.leave(SimpleNamespace(gradient_units=("a",)))
    held = []
    for action in actions:
        memory.act(action)
        held.append({piece: size for piece, size in memory.tensors().items() if "shards" in piece[1]})
    memory.end_scattering()
    memory.drop(())
    return held, memory.tensors()


GRADIENTS, UNSUMMED, SUMMED = (
    ("gradient", "shards of a"),
    ("communication", "unsummed shards of a"),
    ("communication", "summed shards of a"),
)


def test_a_sum_across_groups_of_ranks_is_the_gradients_or_stays_beside_them_until_the_backward_ends():
    memory = memory_of_groups("a", num_replicas=2)
    first, second = (backward(memory, REDUCE_A, SUM_A) for _ in range(2))

    assert first == ([{UNSUMMED: 44}, {GRADIENTS: 44}], {GRADIENTS: 44})
    assert second == (
        [{GRADIENTS: 44, UNSUMMED: 44}, {GRADIENTS: 44, SUMMED: 44}],
        {GRADIENTS: 44},
    )
    message = memory_of_groups("a", num_replicas=2).act(SUM_A)
    assert message is None  # nothing was reduced
    memory.leave(SimpleNamespace(gradient_units=("a",)))
    memory.act(REDUCE_A)
    message = memory.act(SUM_A)
    assert (message.operation, message.size_bytes, sum(message.staging.values())) == ("all_reduce", 44, 0)


def test_a_sum_in_another_dtype_is_no_gradient():
    memory = memory_of_groups("a", num_replicas=2, reduce_dtype="bfloat16")

    assert backward(memory, REDUCE_A, SUM_A) == (
        [{UNSUMMED: 22}, {GRADIENTS: 44, SUMMED: 22}],
        {GRADIENTS: 44},
    )


def test_shards_that_are_not_summed_yet_are_added_up():
    memory = memory_of_groups("a", num_replicas=2)
    early = [backward(memory, REDUCE_A) for _ in range(2)]
    last = backward(memory, REDUCE_A, SUM_A)

    assert early == [([{UNSUMMED: 44}], {UNSUMMED: 44})] * 2
    assert last == ([{UNSUMMED: 44}, {GRADIENTS: 44}], {GRADIENTS: 44})


def test_gradients_stay_where_autograd_made_them_until_they_are_reduced():
    """One of 30 MiB and one of 20 come: no other 50 are there beside them."""
    backward = SimpleNamespace(phase="backward", unit="a", pass_number=0)
    came = [
        replace(storage("gradient", 0, birth_s, 9.0), size_bytes=size * MIB, death_segment=1)
        for birth_s, size in ((0.0, 30), (1.0, 20))
    ]
    events = StepEvents(came, [backward], (), {}, {})
    log = AllocationLog(came, events, [backward], models_states=True, keeps_gradients=True)
    log.segment(0, {("gradient", "a"): 30 * MIB, ("gradient", "a 1"): 20 * MIB}, 1.0)
    assert [change.size_bytes // MIB for change in log.changes] == [30, 20]

    log.states({("gradient", "shards of a"): 25 * MIB})
    assert [change.size_bytes // MIB for change in log.changes] == [30, 20, 25, 0, 0]


def test_each_gathered_parameter_and_gradient_is_allocated_by_itself_and_what_travels_as_one():
    """Of three ranks: 4 x 5 elements of float32 are gathered as 6 x 5, and 2 as 3."""
    memory = memory_of_groups("a")
    memory.turn(Point.FORWARD_BEGINS)
    memory.act(GATHER_A)
    memory.leave(SimpleNamespace(gradient_units=("a",)))

    assert memory.tensors() == {
        ("gathered", "a"): 120,
        ("gathered", "a 1"): 12,
        ("communication", "output of a"): 132,
        ("gradient", "a"): 80,
        ("gradient", "a 1"): 8,
    }
    memory.act(REDUCE_A)
    assert memory.tensors()["gradient", "shards of a"] == 44
    assert sum(memory.held().values()) == sum(memory.tensors().values())


RELEASE_A = Action(kind=ActionKind.RELEASE, unit="a", lane=Lane.COMPUTE, ranks=Ranks.SECONDARY)


def test_a_group_that_is_freed_to_parts_of_fewer_ranks_leaves_one_until_it_is_gathered():
    """Of 132 bytes a third, copied parameter by parameter: the first one's 40 of 120 beside all."""
    memory = memory_of_groups("a", forward_ranks=3)
    memory.turn(Point.FORWARD_BEGINS)
    memory.act(GATHER_A)
    memory.turn(Point.FORWARD_ENDS)
    message = memory.act(RELEASE_A)

    assert memory.tensors() == {("gathered", "parts of a"): 40, ("gathered", "parts of a 1"): 4}
    assert sum(memory.held().values()) + sum(message.staging.values()) == 132 + 40
    memory.act(replace(GATHER_A, ranks=Ranks.SECONDARY))
    assert memory.held()["parameter"] == 132


def test_as_many_inputs_of_reductions_stay_as_the_script_lets():
    memory = memory_of_groups("a", "b", "c", max_inputs=2)
    memory.leave(SimpleNamespace(gradient_units=("a", "b", "c")))
    for name in "abc":
        if memory.must_end_scattering:
            memory.end_scattering()
        memory.act(replace(REDUCE_A, unit=name))

    assert {where for _, where in memory.tensors() if "input" in where} == {"input of b", "input of c"}
    memory.drop(())
    assert memory.held()["communication"] == 0


def test_gradients_stay_whole_until_the_last_micro_batch_where_the_script_reduces_them_there():
    late = LateSharding(reduces=True)
    memory = memory_of_groups("a", late=late)
    memory.leave(SimpleNamespace(gradient_units=("a",)))

    assert memory.holds_back(REDUCE_A, Point.AFTER_BACKWARD, is_last=False)
    assert memory.held()["gradient"] == 88
    assert not memory.holds_back(REDUCE_A, Point.AFTER_BACKWARD, is_last=True)


def test_whole_gradients_that_are_summed_in_another_dtype_are_kept_in_that():
    memory = memory_of_groups(
        "a", late=LateSharding(reduces=True), param_dtype="bfloat16", reduce_dtype="float32"
    )
    memory.leave(SimpleNamespace(gradient_units=("a",)))
    before = memory.held()["gradient"]
    memory.holds_back(REDUCE_A, Point.AFTER_BACKWARD, is_last=False)

    assert (before, memory.held()["gradient"]) == (44, 88)
    memory.act(REDUCE_A)
    assert memory.held()["gradient"] == 44  # a third of 132


def test_parameters_stay_between_micro_batches_where_the_script_frees_them_after_the_last():
    late, release = LateSharding(frees=True), replace(RELEASE_A, ranks=Ranks.ALL)

    assert late.holds_back(release, Point.AFTER_BACKWARD, is_last=False)
    assert late.holds_back(release, Point.BACKWARD_ENDS, is_last=False)
    assert not late.holds_back(release, Point.AFTER_FORWARD, is_last=False)
    assert not late.holds_back(release, Point.AFTER_BACKWARD, is_last=True)
