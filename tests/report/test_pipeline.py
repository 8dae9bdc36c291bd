"""The report's section about a pipeline's schedule."""

from memadvisor.cost.pipelines import ChunkCosts, simulate_pipeline
from memadvisor.report.pipeline import MAX_PIECES, pipeline_section, schedule_figure, write_pipeline_report


def times_of(name, devices, microbatches, chunks=1):
    cost = ChunkCosts(forward_s=0.01, input_backward_s=0.01, weight_backward_s=0.01, activation_bytes=2**30)
    return simulate_pipeline(
        name, [cost] * (devices * chunks), microbatches, num_devices=devices, timeline=True
    )


def test_each_piece_is_a_bar_where_it_runs():
    times = times_of("interleaved", 4, 8, chunks=2)
    figure = schedule_figure(times)

    bars = [
        (row, round(base, 6), round(base + length, 6))
        for trace in figure.traces
        for row, base, length in zip(trace["y"], trace["base"], trace["x"], strict=True)
    ]
    assert sorted(bars) == sorted(
        (float(piece.device), round(1000 * piece.start_s, 6), round(1000 * piece.end_s, 6))
        for piece in times.timeline
    )
    assert {trace["name"] for trace in figure.traces} >= {"forward, first chunk", "backward, second chunk"}


def test_too_many_pieces_become_stretches_of_computing():
    times = times_of("1f1b", 64, 256)
    figure = schedule_figure(times)

    assert len(times.timeline) > MAX_PIECES
    assert sum(len(trace["x"]) for trace in figure.traces) <= MAX_PIECES
    busy_s = sum(length for trace in figure.traces for length in trace["x"])
    assert 0.99 * sum(times.busy_s) <= busy_s <= sum(times.span_s)
    assert "too many to draw" in figure.note


def test_a_page_of_its_own_holds_figure_and_table(tmp_path):
    times = times_of("chimera", 4, 8)
    write_pipeline_report(times, tmp_path / "pipeline.html")
    text = (tmp_path / "pipeline.html").read_text()

    assert 'data-figure="pipeline"' in text
    assert "Each device holds 2 stages" in text
    assert "4.00 GiB" in text
    assert len(pipeline_section(times).shared) == 2
