"""The roofline figure is drawn with its roofs where the hardware is known, and without guesses where it is not."""

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.hardware.hardware import Hardware
from memadvisor.report.arithmetic import operators_table, roofline_figure, roofline_table
from memadvisor.report.blocks import Figure, Missing
from memadvisor.report.view import RankView
from tests.make_run import make_run

MACHINE = Hardware(
    name="a machine",
    kind="given",
    source="a test",
    memory_bytes=None,
    memory_bandwidth_bytes_per_s=1e9,
    peak_flops_per_s={"float32": 1e10},
)


def view(hardware=MACHINE, **changes):
    run = make_run(num_ranks=1, **changes)
    analysis = analyze(run, hardware)
    return RankView(analysis, run.ranks[0], analysis.ranks[0], 300)


def test_the_roof_is_the_lower_of_two_and_holds_the_ridge():
    figure = roofline_figure(view())

    assert isinstance(figure, Figure)
    roof = figure.traces[0]
    assert roof["x"][1] == 10
    assert roof["y"] == [min(1e10, x * 1e9) for x in roof["x"]]
    assert figure.kinds == ("measured", "given")


def test_without_hardware_there_are_points_and_no_roof():
    figure = roofline_figure(view(None))

    assert [trace["name"] for trace in figure.traces] == ["units", "modules"]
    assert "No roofs" in figure.note


def test_of_very_many_modules_the_heaviest_are_drawn():
    points = roofline_figure(view(num_blocks=200)).traces

    assert [len(trace["x"]) for trace in points[1:]] == [100, 100]


@pytest.mark.parametrize("make", [roofline_figure, operators_table])
def test_an_untraced_run_says_why_there_is_nothing(make):
    assert isinstance(make(view(traced_step=None)), Missing)


def test_tables_name_what_bounds_and_where_times_are_of_launching():
    assert "blocks.0.mlp.up" in roofline_table(view()).text
    assert "launch time" in operators_table(view(device="cuda:0")).text
    assert "launch time" not in operators_table(view()).text


def test_without_hardware_the_table_has_no_columns_of_its_roofs():
    """Two columns of nothing but dashes."""
    known, unknown = (roofline_table(view(hardware)).text for hardware in (MACHINE, None))

    assert "bound by" in known and "of the roof" in known and "Bound by latency" in known
    assert "bound by" not in unknown and "roof" not in unknown and "latency" not in unknown
