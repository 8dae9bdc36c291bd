"""The simulation against one without cleverness, and what must hold for every pipeline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.pipelines import SCHEDULES, ChunkCosts, Ending, pipeline_order, simulate_pipeline
from memadvisor.cost.pipelines.automatic import AUTOMATIC, automatic_graph
from memadvisor.errors import UsageError
from tests.cost.pipelines.naive import peak_bytes, play
from tests.cost.pipelines.shapes import pipelines, unit_costs

WRITTEN = [name for name in SCHEDULES if name not in AUTOMATIC]  # their order does not depend on times


def order_of(name, costs, links, microbatches, devices):
    if name in AUTOMATIC:
        return automatic_graph(name, tuple(costs), tuple(links), microbatches).order
    return pipeline_order(name, devices, microbatches, len(costs) // devices)


@given(pipelines(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_times_and_bytes_are_those_of_a_naive_simulation(pipeline, blocking):
    name, devices, microbatches, costs, links = pipeline
    times = simulate_pipeline(
        name,
        costs,
        microbatches,
        num_devices=devices,
        transfer_s=links,
        blocking=blocking,
        timeline=True,
    )

    order = order_of(name, costs, links, microbatches, devices)
    expected = play(order, costs, links, blocking)
    found = {(p.device, (p.kind, p.chunk, p.microbatch)): (p.start_s, p.end_s) for p in times.timeline}
    assert found.keys() == expected.keys()
    for piece, stretch in expected.items():
        assert found[piece] == pytest.approx(stretch, rel=1e-12, abs=1e-12)
    if name != "bpipe":  # which moves what it holds
        assert times.peak_held_bytes == tuple(peak_bytes(order, costs, device) for device in range(devices))


@pytest.mark.parametrize("name", WRITTEN)
def test_devices_that_wait_for_transfers_are_played_as_naively_too(name):
    """One case of each schedule for sure, with links that differ."""
    costs = unit_costs(8 if name in ("zb-v", "dualpipe-v", "interleaved", "breadth-first") else 4)
    links = [0.25, 0.5, 0.125, 0.375]
    times = simulate_pipeline(name, costs, 12, num_devices=4, transfer_s=links, blocking=True, timeline=True)

    expected = play(pipeline_order(name, 4, 12, len(costs) // 4), costs, links, blocking=True)
    for piece in times.timeline:
        work = (piece.kind, piece.chunk, piece.microbatch)
        assert (piece.start_s, piece.end_s) == expected[piece.device, work]


@given(pipelines(names=WRITTEN), st.booleans())
@settings(max_examples=100, deadline=None)
def test_faster_links_never_make_a_step_longer(pipeline, blocking):
    name, devices, microbatches, costs, links = pipeline

    def step_s(share):
        return simulate_pipeline(
            name,
            costs,
            microbatches,
            num_devices=devices,
            transfer_s=[share * link for link in links],
            blocking=blocking,
        ).makespan_s

    assert step_s(0.0) <= step_s(0.5) + 1e-9 <= step_s(1.0) + 2e-9


@given(pipelines())
@settings(max_examples=100, deadline=None)
def test_a_device_that_waits_for_its_transfers_is_never_faster(pipeline):
    name, devices, microbatches, costs, links = pipeline
    overlapped, waiting = (
        simulate_pipeline(name, costs, microbatches, num_devices=devices, transfer_s=links, blocking=blocking)
        for blocking in (False, True)
    )

    assert overlapped.makespan_s <= waiting.makespan_s + 1e-9
    assert overlapped.busy_s == pytest.approx(waiting.busy_s)  # sums in another order
    assert overlapped.peak_held_bytes == waiting.peak_held_bytes


@given(pipelines())
@settings(max_examples=100, deadline=None)
def test_busy_time_is_the_work_and_no_step_is_shorter_than_it(pipeline):
    name, devices, microbatches, costs, links = pipeline
    times = simulate_pipeline(name, costs, microbatches, num_devices=devices, transfer_s=links)

    work = microbatches * sum(c.forward_s + c.input_backward_s + c.weight_backward_s for c in costs)
    assert sum(times.busy_s) == pytest.approx(work)
    assert max(times.busy_s) <= max(times.span_s) + 1e-9 <= times.makespan_s + 2e-9
    assert 0 <= times.bubble_share + 1e-9 < 1
    assert max(times.busy_s) <= times.step_s + 1e-9


def test_a_device_that_waits_for_its_transfers_pays_for_them_around_every_piece():
    """1F1B of three devices: the middle one exchanges with a neighbour after every forward and backward."""
    costs = unit_costs(3)

    def makespan_s(microbatches, blocking):
        return simulate_pipeline(
            "1f1b", costs, microbatches, num_devices=3, transfer_s=0.25, blocking=blocking
        ).makespan_s

    # F, transfer, F, transfer, F and BW of the last device, and the same way back.
    assert makespan_s(1, False) == makespan_s(1, True) == 10.0
    assert makespan_s(30, True) - makespan_s(29, True) == pytest.approx(3.5)
    # Overlapped, three in flight on the first device share the four transfers of a round trip.
    assert (makespan_s(30, False) - makespan_s(27, False)) / 3 == pytest.approx(3 + 4 * 0.25 / 3)


@given(pipelines(names=["2bw"], most_devices=5, most_microbatches=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_pace_without_flushes_is_that_of_many_steps_in_a_row(pipeline, blocking):
    """The pace of 2BW is what a microbatch adds to 1F1B after a long time, averaged over a round of every cycle."""
    name, devices, microbatches, costs, links = pipeline
    step_s = simulate_pipeline(
        name, costs, microbatches, num_devices=devices, transfer_s=links, blocking=blocking
    ).step_s

    def long_s(count):
        return simulate_pipeline(
            "1f1b", costs, count, num_devices=devices, transfer_s=links, blocking=blocking
        ).makespan_s

    # 60 is a multiple of every cycle's length up to 5; the state may take many rounds to settle.
    pace_s = (long_s(960) - long_s(900)) / 60
    assert step_s / microbatches == pytest.approx(pace_s, rel=1e-6)


@given(pipelines(names=["bpipe"], most_devices=9), st.floats(0.0, 3.0), st.booleans())
@settings(max_examples=80, deadline=None)
def test_balancing_costs_time_only_where_moves_are_slow(pipeline, balance_s, blocking):
    """1F1B's times for moves that take none; slower moves never make a step shorter; work stays what it is."""
    _, devices, microbatches, costs, links = pipeline

    def play(name, **more):
        return simulate_pipeline(
            name, costs, microbatches, num_devices=devices, transfer_s=links, blocking=blocking, **more
        )

    plain, free, fast, slow = (
        play("1f1b"),
        play("bpipe"),
        play("bpipe", balance_s=balance_s / 2),
        play("bpipe", balance_s=balance_s),
    )
    assert free.makespan_s == pytest.approx(plain.makespan_s)
    assert free.makespan_s <= fast.makespan_s + 1e-9 <= slow.makespan_s + 2e-9
    assert slow.busy_s == pytest.approx(plain.busy_s)


def test_a_device_holds_the_chunks_that_its_schedule_deals_it():
    looped = simulate_pipeline("interleaved", unit_costs(6), 6, num_devices=3)
    two_versions = simulate_pipeline("2bw", unit_costs(3), 6, num_devices=3)

    assert looped.chunks == ((0, 3), (1, 4), (2, 5))
    assert (looped.weight_copies, looped.weight_versions, looped.ending) == (1, 1, Ending.FLUSH)
    assert (two_versions.weight_versions, two_versions.ending) == (2, Ending.NEVER_EMPTY)


def test_pipelines_in_two_directions_hold_two_copies():
    for name in ("chimera", "dualpipe"):
        times = simulate_pipeline(name, unit_costs(4), 8, num_devices=4)

        assert times.weight_copies == 2
        assert times.chunks == ((0, 3), (1, 2), (1, 2), (0, 3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schedule": "dualpipe9", "costs": unit_costs(4)}, "is not a pipeline schedule"),
        ({"schedule": "interleaved", "costs": unit_costs(8)}, "whole groups of 4"),
        ({"schedule": "1f1b", "costs": unit_costs(8)}, "1f1b has 1 chunk of the model a device, not 2"),
        ({"schedule": "1f1b", "costs": unit_costs(7)}, "7 chunks .* 4 devices"),
        ({"schedule": "1f1b", "costs": []}, "at least one"),
        ({"schedule": "1f1b", "costs": unit_costs(4), "num_microbatches": 0}, "at least one"),
        ({"schedule": "1f1b", "costs": unit_costs(4), "transfer_s": [0.1, 0.1]}, "2 transfer times"),
        ({"schedule": "1f1b", "costs": unit_costs(4), "transfer_s": -1.0}, "cannot be"),
        ({"schedule": "1f1b", "costs": unit_costs(4, forward_s=float("nan"))}, "cannot be"),
        ({"schedule": "1f1b", "costs": unit_costs(4, held=1, weight_held=2)}, "cannot be"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(arguments, words):
    with pytest.raises(UsageError, match=words) as caught:
        simulate_pipeline(**{"num_microbatches": 6, "num_devices": 4, **arguments})
    assert "\n" not in caught.value.one_line()


def test_different_first_and_last_chunks_are_played_as_they_are():
    """Worked out by hand: the head makes the last device the slowest, which then never waits."""
    middle = ChunkCosts(forward_s=1, input_backward_s=1, weight_backward_s=1)
    head = ChunkCosts(forward_s=2, input_backward_s=2, weight_backward_s=2)
    times = simulate_pipeline("1f1b", [middle, head], 5, num_devices=2)

    assert times.makespan_s == 1 + 5 * 6 + 2
    assert times.busy_s == (15, 30)
