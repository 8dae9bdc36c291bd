"""What the storages of a traced step become for playing it again."""

import dataclasses

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.allocator_settings import MIB
from tests.cuda_run import ADDRESS, cuda_run


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
