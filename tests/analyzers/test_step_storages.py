"""What the storages of a traced step become for playing it again."""

import dataclasses

from memadvisor.analyzers.segments import captured_step
from memadvisor.analyzers.step_storages import requests
from memadvisor.cost.allocator_settings import MIB
from memadvisor.run.records import CUBLAS
from tests.cuda_run import ADDRESS, cuda_run
from tests.make_run import storage


def test_a_storage_is_of_the_stream_whose_segment_it_lies_in():
    """0 is the stream that has most; what lies in no segment that is left is taken for its."""
    run = cuda_run()
    (rank,) = run.ranks
    *most, last = rank.segments
    segments = (*most, dataclasses.replace(last, stream=7))
    aside, gone = [row for row in rank.storages if row.category == "activation"][:2]
    places = {aside.storage_id: last.address, gone.storage_id: ADDRESS + 500 * MIB}
    storages = tuple(
        dataclasses.replace(row, address=places.get(row.storage_id, row.address)) for row in rank.storages
    )
    rank = dataclasses.replace(rank, segments=segments, storages=storages)
    step = captured_step(dataclasses.replace(run, ranks=(rank,)))

    assert [(item.category, item.birth_s) for item in step.storages if item.stream] == [
        ("activation", aside.birth_s)
    ]
    assert {item.stream for item in step.storages} == {0, 1}


def test_parameters_come_in_the_order_of_their_addresses_within_a_segment():
    """`module.to` moves those of inner modules first, and not in the order of `named_parameters`."""
    run = cuda_run()
    (rank,) = run.ranks
    segment = max(rank.segments, key=lambda row: row.total_bytes)
    own = [row for row in rank.storages if row.phase == "baseline" and row.category == "parameter"]
    places = {row.storage_id: segment.address + 512 * (len(own) - number) for number, row in enumerate(own)}
    storages = tuple(
        dataclasses.replace(row, address=places.get(row.storage_id, row.address)) for row in rank.storages
    )
    step = captured_step(dataclasses.replace(run, ranks=(dataclasses.replace(rank, storages=storages),)))
    played = [item.size_bytes for item in step.storages if item.category == "parameter"]
    plain = [item.size_bytes for item in captured_step(run).storages if item.category == "parameter"]

    assert len(set(plain)) > 1
    assert played == plain[::-1]


def test_of_what_an_operator_makes_inside_itself_others_of_its_block_tell_what_was_asked_for():
    """A block of 12 MiB was given for 11.5; so a buffer of unknown shape in such a block is taken to be of 11.5."""
    shaped = storage(device="cuda:0", size_bytes=12 * MIB, shape=f"[{23 * MIB // 8}]")
    inside = storage(device="cuda:0", size_bytes=12 * MIB, shape="", dtype="", operator="inside aten::clone")
    other = dataclasses.replace(inside, size_bytes=14 * MIB)
    asked = requests([shaped, inside, other])

    assert [asked(row) for row in (shaped, inside, other)] == [23 * MIB // 2, 23 * MIB // 2, 14 * MIB]
    assert requests([other])(inside) == 12 * MIB
    assert asked(dataclasses.replace(inside, operator=CUBLAS)) == 12 * MIB


def test_a_block_that_others_were_given_by_chance_tells_nothing():
    """Of three tensors of 11.5 MiB two were given blocks of just that."""
    exact = storage(device="cuda:0", size_bytes=23 * MIB // 2, shape=f"[{23 * MIB // 8}]")
    chance = dataclasses.replace(exact, size_bytes=12 * MIB)
    inside = storage(device="cuda:0", size_bytes=12 * MIB, shape="", dtype="", operator="inside aten::clone")

    assert requests([exact, exact, chance, inside])(inside) == 12 * MIB


def test_layers_are_alike_in_what_an_operator_makes_inside_itself():
    """The smallest block of about as much is what all asked for; one of half as much is another's."""
    rows = [
        storage(device="cuda:0", size_bytes=size * MIB // 4, shape="", dtype="", operator="inside aten::sum")
        for size in (12, 13, 6)
    ]
    asked = requests(rows)

    assert [asked(row) for row in rows] == [3 * MIB, 3 * MIB, 6 * MIB // 4]
