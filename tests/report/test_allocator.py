"""The tables of the CUDA allocator: there when there is something to say, and escaped."""

import dataclasses

from memadvisor.analyzers.analysis import analyze
from memadvisor.report.page import render
from tests.cuda_run import cuda_run
from tests.make_run import make_run


def test_a_cuda_run_shows_its_segments_and_what_pins_them():
    run = cuda_run()
    rank = run.ranks[0]
    hostile = tuple(dataclasses.replace(row, module="<img src=x>") for row in rank.storages)
    page = render(analyze(dataclasses.replace(run, ranks=(dataclasses.replace(rank, storages=hostile),))))

    assert "Reserved by the CUDA caching allocator" in page
    assert "Segments that are partly free" in page
    assert "12.0 MiB" in page and "of &lt;img src=x&gt;" in page
    assert "<img src=x>" not in page


def test_a_small_cpu_run_says_nothing_of_it():
    page = render(analyze(make_run(num_ranks=1)))
    assert "CUDA caching allocator" not in page and "Predicted for a CUDA device" not in page
