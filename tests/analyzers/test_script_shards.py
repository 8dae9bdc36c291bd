"""Which of a script's own FSDP2 plans are made for, and what of its traced step is communication."""

import dataclasses
from types import SimpleNamespace

import pytest

from memadvisor.analyzers.script_shards import (
    absent_in_backward,
    check_predictable,
    late_sharding,
    with_buffers_counted,
)
from memadvisor.errors import UsageError
from memadvisor.run.parallel_records import ShardGroup
from memadvisor.run.records import Collective, Module, Span, Storage, Unit
from tests.make_run import make_run

GROUPS = ("", "a")


def group(name, num_ranks=2, num_replicas=2, *, offloads=False, is_plain=True, forward_ranks=None):
    return ShardGroup(name, num_ranks, num_replicas, True, None, None, offloads, is_plain, forward_ranks)


def without(one):
    """The same group, which no backward gathers."""
    return dataclasses.replace(one, gathers_in_backward=False)


def collective(operation, issue_s, size_bytes, group_size=2, phase="backward"):
    return Collective(
        step=3, operation=operation, group=operation, group_size=group_size, sequence=0, size_bytes=size_bytes,
        dtype="float32", phase=phase, unit="a", asynchronous=False, issue_s=issue_s, end_s=issue_s + 0.1,
        wait_start_s=None, wait_end_s=None,
    )  # fmt: skip


def unit(name, shard_group):
    return Unit(name, "Linear", False, 100, 400, 400, shard_group=shard_group)


def run_of(*summed, groups=None, world_size=4, group_size=2):
    """A rank whose step has a micro-batch for each of `summed`, which says whether its gradients are summed across."""
    rows = []
    for number, is_summed in enumerate(summed):
        for place, _ in enumerate(GROUPS):
            at_s = 10.0 * number + place
            rows.append(collective("reduce_scatter", at_s, 400))
            rows += [collective("all_reduce", at_s + 0.5, 200, group_size)] if is_summed else []
    rank = dataclasses.replace(
        make_run(num_ranks=world_size).ranks[0],
        shard_groups=groups or tuple(map(group, GROUPS)),
        units=(unit("head", ""), unit("a", "a")),
        collectives=tuple(rows),
    )
    return rank, SimpleNamespace(index=3, num_micro_batches=len(summed))


def micro_batches(*counts, num_replicas=1):
    """A rank whose micro-batches have so many (gathers in the forward, reductions in the backward) each."""
    rows, spans = [], []
    for number, (gathers, reductions) in enumerate(counts):
        at_s = 10.0 * number
        spans.append(Span(3, "forward", "", number, at_s, at_s + 4))
        rows += [collective("all_gather", at_s + 1 + place, 400, phase="forward") for place in range(gathers)]
        rows += [collective("reduce_scatter", at_s + 5 + place, 400) for place in range(reductions)]
    rank, _ = run_of(groups=tuple(group(name, 2, num_replicas) for name in GROUPS), world_size=2)
    return (
        dataclasses.replace(rank, collectives=tuple(rows), spans=tuple(spans)),
        SimpleNamespace(index=3, num_micro_batches=len(counts)),
    )


def refusal(rank, step):
    try:
        check_predictable(rank, step)
    except UsageError as error:
        return error.one_line()
    return None


@pytest.mark.parametrize(
    ("summed", "is_late"),
    [((True,), False), ((True, True), False), ((False, True), True), ((False, False, True), True)],
)
def test_plans_are_made_for_sums_in_each_micro_batch_and_in_the_last_one_alone(summed, is_late):
    rank, step = run_of(*summed)

    assert refusal(rank, step) is None
    assert late_sharding(rank, step).sums is is_late


def test_other_sums_are_refused():
    for summed in ((False,), (True, False), (False, True, True), (False, True, False)):
        assert "neither in each micro-batch nor in the last one alone" in refusal(*run_of(*summed)), summed


def test_what_no_plan_is_made_for_is_named():
    for groups, words in (
        ((group("", 4, 1), group("a")), "among fewer ranks than others"),
        ((group("", 1, 4), group("a", 1, 4)), "with no other rank"),
        ((group("", is_plain=False), group("a")), "otherwise than by rows"),
        (
            (group("", 4, 1, forward_ranks=2), without(group("a", 4, 1, forward_ranks=2))),
            "no backward gathers again",
        ),
        ((group("", 4, 1), group("a", 4, 1, forward_ranks=2)), "those of others to none or other ones"),
    ):
        assert words in refusal(*run_of(True, groups=groups)), words
    assert "leaves ranks out" in refusal(*run_of(True, world_size=8))


def test_shards_that_are_offloaded_are_elsewhere_on_a_gpu_alone():
    rank, step = run_of(True, groups=tuple(group(name, offloads=True) for name in GROUPS))
    on_gpu = dataclasses.replace(rank, process=dataclasses.replace(rank.process, device="cuda:0"))

    assert refusal(rank, step) is None
    assert "offloads its shards" in refusal(on_gpu, step)


def test_several_models_are_named_as_such():
    """A generator and what tells its samples apart were said to be reduced too seldom."""
    rank, step = run_of(True)
    two = tuple(
        dataclasses.replace(u, model=name) for u, name in zip(rank.units, ("first", "second"), strict=True)
    )

    assert "some or all of several models" in refusal(dataclasses.replace(rank, units=two), step)


def test_plans_are_made_for_parts_of_fewer_ranks_where_others_hold_the_same_shards():
    groups = (group("", forward_ranks=2), group("a", forward_ranks=2))

    assert (
        refusal(
            *run_of(
                True,
                groups=tuple(dataclasses.replace(g, num_ranks=4, num_replicas=2) for g in groups),
                world_size=8,
            )
        )
        is None
    )


def test_a_wrapper_around_a_group_is_no_part_of_a_unit():
    """As checkpointing by accelerate has it: each block was said to be gathered in parts."""
    rank, step = run_of(True, groups=(group(""), group("a.inner")))
    rank = dataclasses.replace(rank, units=(unit("head", ""), unit("a", "a.inner")))
    wrapped, parted = (
        tuple(Module(name, "Block", name) for name in ("a", "a.inner", *others))
        for others in ((), ("a.other",))
    )

    assert refusal(dataclasses.replace(rank, modules=wrapped), step) is None
    assert "gathers parts of 'a'" in refusal(dataclasses.replace(rank, modules=parted), step)


def test_units_that_no_backward_gathers_cannot_run_again():
    rank, _ = run_of(True, groups=(group(""), without(group("a"))))

    assert absent_in_backward(rank) == {"a"}


@pytest.mark.parametrize(
    ("counts", "reduces", "frees"),
    [
        (((2, 2),), False, False),
        (((2, 2), (2, 2)), False, False),
        (((2, 0), (2, 0), (2, 2)), True, False),
        (((2, 2), (0, 2), (0, 2)), False, True),
        (((2, 0), (0, 2)), True, True),
    ],
)
def test_what_is_left_to_the_last_micro_batch_is_told_by_its_collectives(counts, reduces, frees):
    rank, step = micro_batches(*counts)
    late = late_sharding(rank, step)

    assert refusal(rank, step) is None
    assert (late.reduces, late.sums, late.frees) == (reduces, False, frees)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (((2, 2), (2, 0)), "neither in each micro-batch nor in the last one alone"),
        (((2, 0), (2, 1)), "neither in each micro-batch nor in the last one alone"),
        (
            ((2, 2), (1, 2), (1, 2)),
            "frees some parameters after the backward of a micro-batch, and others not",
        ),
    ],
)
def test_what_is_done_in_other_micro_batches_is_refused(counts, words):
    assert words in refusal(*micro_batches(*counts))


def test_a_mesh_with_one_replica_is_like_none_where_nothing_is_accumulated():
    groups = tuple(group(name, 2, 1) for name in GROUPS)
    one, two = (
        refusal(*run_of(*[True] * number, groups=groups, world_size=2, group_size=1)) for number in (1, 2)
    )

    assert one is None
    assert "a mesh with one replica" in two


def test_what_a_reduction_leaves_and_is_no_gradient_is_communication():
    """The last one that is as large before the reduction is issued, and neither gradients nor what comes later."""

    def storage(number, category, birth_s, size_bytes=200):
        return Storage(
            storage_id=number, birth_s=birth_s, death_s=None, size_bytes=size_bytes, category=category, dtype="float32",
            shape="[50]", module="a", unit="a", phase="backward", micro_batch=0, operator="aten::empty", device="cpu",
            last_use_s=None, last_forward_use_s=None,
        )  # fmt: skip

    rank, step = run_of(False, True)
    reductions = tuple(row for row in rank.collectives if row.issue_s in (1.0, 10.0))
    rows = (
        storage(0, "temporary", 0.2),
        storage(1, "temporary", 0.9),
        storage(2, "temporary", 0.95, 400),
        storage(3, "temporary", 1.2),
        storage(4, "gradient", 9.9),
    )
    counted = with_buffers_counted(
        dataclasses.replace(rank, collectives=reductions, storages=rows), step
    ).storages

    assert [row.category for row in counted] == [
        "temporary", "communication", "temporary", "temporary", "gradient"
    ]  # fmt: skip
