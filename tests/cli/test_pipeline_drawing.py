"""Schedules drawn in the terminal."""

import io

from rich.console import Console

from memadvisor.cli.pipeline_drawing import pipeline_lines, print_pipeline
from memadvisor.cost.pipelines import SCHEDULES, ChunkCosts, simulate_pipeline


def times_of(name, devices=4, microbatches=8, **more):
    chunks = {"zb-v": 2, "dualpipe-v": 2, "interleaved": 2, "breadth-first": 2}.get(name, 1)
    cost = ChunkCosts(forward_s=1, input_backward_s=1, weight_backward_s=1, activation_bytes=2**30)
    return simulate_pipeline(
        name, [cost] * (devices * chunks), microbatches, num_devices=devices, timeline=True, **more
    )


def rows(name, width=400, **more):
    return [line.plain for line in pipeline_lines(times_of(name, **more), width)]


def test_a_row_reads_without_color():
    title, first, second, *legend = rows("1f1b", devices=2, microbatches=3)

    assert title.startswith("1f1b, 2 devices, 3 micro-batches (predicted")
    assert first == "device 0  F0-F1-......B0----F2-B1----...B2----"
    assert second == "device 1  ...F0-B0----F1-B1----F2-B2----......"
    assert legend[0] == "F forward, B backward, number: micro-batch, ... waiting"
    assert legend[1] == "forwards and backwards of a step 12.0 s, of which devices wait 25.0 % on average"
    assert legend[2] == "most in flight by device: 2 1 micro-batches, 2.00 GiB of activations on the fullest"


def test_every_piece_of_every_schedule_is_drawn():
    for name in SCHEDULES:
        times = times_of(name)
        drawn = "".join(line.plain for line in pipeline_lines(times, 2000)[1:5])
        names = ("F", "B", "W") if name.startswith("zb") else ("F", "B")

        for kind in names:
            assert drawn.count(kind) == 8 * (1 if name == "dualpipe" else len(times.chunks[0])) * 4 or (
                times.weight_copies == 2
            )


def test_what_does_not_fit_is_cut_and_said():
    lines = rows("zb-v", width=60)

    assert all(len(line) == 60 for line in lines[1:5])
    assert "Cut to the width: the first " in "".join(lines)
    assert "a, b, ... a device's chunks" in "".join(lines)


def test_very_many_devices_leave_some_out():
    lines = rows("1f1b", width=100, devices=100, microbatches=2)

    assert "(52 devices more)" in lines
    assert lines[-1].startswith("most in flight by device: 1 to 2 micro-batches")


def test_the_console_gets_text_that_no_markup_touches():
    out = io.StringIO()
    print_pipeline(times_of("dualpipe"), Console(file=out, width=90))

    assert "2 copies of the weights" in " ".join(out.getvalue().split())
    assert "\x1b" not in out.getvalue()
