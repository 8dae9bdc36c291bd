"""What a script sends itself stays where a plan is played; DistributedDataParallel's buffers go."""

import dataclasses

from memadvisor.analyzers.own_messages import with_own_messages
from memadvisor.analyzers.segments import captured_step
from tests.make_run import make_run, storage


def with_message(run, size_bytes):
    """The run with a buffer of a collective in the middle of each unit's backward."""
    (rank, *others) = run.ranks
    spans = [s for s in rank.spans if s.step == rank.traced_step.index and s.kind == "unit_backward"]
    rows = [
        storage(
            storage_id=10**6 + number, birth_s=span.start_s, death_s=span.end_s, size_bytes=size_bytes,
            category="communication", unit=span.unit, module=span.unit, phase="backward", device=rank.process.device,
        )
        for number, span in enumerate(spans)
    ]  # fmt: skip
    changed = dataclasses.replace(rank, storages=(*rank.storages, *rows))
    return dataclasses.replace(run, ranks=(changed, *others)), {span.unit for span in spans}


def test_what_forwards_and_backwards_send_is_no_buffer_of_the_engines():
    (rank,) = make_run(num_ranks=1).ranks
    kept = rank.saved[0].storage_id
    rows = (
        storage(storage_id=kept, category="communication"),
        storage(storage_id=-2, category="communication"),
        storage(storage_id=-3, category="communication", phase="backward"),
        storage(storage_id=-4, category="communication", phase="baseline"),
        storage(storage_id=-5, category="communication", phase="outside"),
        storage(storage_id=-6, category="gradient", phase="backward"),
    )
    counted = with_own_messages(dataclasses.replace(rank, storages=rows)).storages

    assert [row.category for row in counted] == [
        "activation", "temporary", "temporary", "communication", "communication", "gradient"
    ]  # fmt: skip


def test_a_plan_counts_what_a_backward_of_the_script_sends():
    """It was left out: of attention whose heads are sent to other ranks a plan was predicted 3.4 % too low."""
    plain = make_run(num_ranks=2)
    sent, units = with_message(plain, 10**6)
    without, with_it = captured_step(plain), captured_step(sent)

    grown = 0
    for before, after in zip(without.segments, with_it.segments, strict=True):
        if before.phase == "backward" and before.unit in units:
            more = sum(after.passing_gradients.peak.values()) - sum(before.passing_gradients.peak.values())
            assert more <= 10**6
            grown += more > 0
    assert grown


def test_buckets_that_ddp_makes_anew_in_the_traced_step_are_its_own():
    """In a static graph that is the third step's forward; they were predicted to stay, 15 % of a small model's peak."""
    (rank, _) = make_run(num_ranks=2).ranks
    inside_s = (rank.traced_step.start_s + rank.traced_step.end_s) / 2
    rows = (
        storage(storage_id=-1, category="communication", phase="baseline", death_s=inside_s),
        storage(storage_id=-2, category="communication", phase="forward", birth_s=inside_s, death_s=None),
        storage(storage_id=-3, category="communication", phase="forward", birth_s=inside_s, death_s=inside_s),
    )
    with_ddp = dataclasses.replace(rank.process, has_ddp=True)

    def categories(process, rows):
        counted = with_own_messages(dataclasses.replace(rank, process=process, storages=rows)).storages
        return [row.category for row in counted]

    assert categories(with_ddp, rows) == ["communication", "communication", "temporary"]
    assert categories(with_ddp, rows[1:]) == ["temporary", "temporary"]
    without = dataclasses.replace(rank.process, has_ddp=False)
    assert categories(without, rows) == ["communication", "temporary", "temporary"]
