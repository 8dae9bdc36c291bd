"""Two runs as one page: complete, offline, escaped, and true to the differences."""

import base64
import dataclasses
import json
import re
import stat

import numpy as np
import plotly.graph_objects as go
import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.run_difference import run_difference
from memadvisor.errors import UsageError
from memadvisor.report.difference_page import render_difference, write_difference
from memadvisor.units import format_bytes
from tests.make_run import make_run
from tests.report.hostile import PLAN, hostile_run
from tests.report.test_page import _Page as Page

FIGURES = {"both-memory", "both-categories", "both-peaks", "both-units", "both-steps", "both-every-step"}


def compared(before, after):
    return run_difference(analyze(before), analyze(after))


def page_of(before, after):
    return Page(render_difference(compared(before, after)))


def unpacked(series):
    return np.frombuffer(base64.b64decode(series["bdata"]), "<f8")


PLAIN, PLANNED = make_run(num_steps=13), make_run(num_steps=13, plan=PLAN, recompute=("blocks.1",))


def test_both_runs_of_two_ranks_have_every_figure_and_plotly_accepts_each():
    page = page_of(PLAIN, PLANNED)

    assert set(page.figures) == {
        *(f"{name}-rank{rank}" for name in FIGURES for rank in (0, 1)),
        "prediction",
    }
    for name, figure in page.figures.items():
        text = re.sub(r'"var\(--[a-z-]+\)"', '"#123456"', json.dumps(figure))
        assert go.Figure(data=json.loads(text)["traces"], layout=json.loads(text)["layout"]).data, name


def test_the_highest_moments_drawn_are_the_two_peaks_to_the_byte_on_one_axis():
    figure = page_of(PLAIN, PLANNED).figures["both-memory-rank0"]

    peaks = [analyze(run).ranks[0].peak.timeline_bytes for run in (PLAIN, PLANNED)]
    lines = {trace["name"]: trace for trace in figure["traces"] if trace["type"] == "scatter"}
    assert [round(unpacked(lines[name]["y"]).max() * 2**20) for name in ("before", "after")] == peaks
    assert not any("yaxis" in line or "xaxis" in line for line in lines.values())
    assert figure["layout"]["yaxis"]["range"][1] * 2**20 > max(peaks)


def test_bars_of_the_peaks_sum_to_them_and_the_predicted_one_is_hatched():
    found = compared(PLAIN, PLANNED)
    figure = page_of(PLAIN, PLANNED).figures["both-peaks-rank0"]

    sums, hatched = [0.0, 0.0, 0.0], set()
    for trace in figure["traces"]:
        sums[trace["y"][0]] += trace["x"][0] * 2**20
        if "pattern" in trace["marker"]:
            hatched.add(trace["y"][0])
    peak = found.ranks[0].peak_bytes
    assert sums == pytest.approx([peak.before, sum(PLAN.prediction.by_category_bytes.values()), peak.after])
    assert hatched == {1}
    assert [label.partition("<br>")[0] for label in figure["layout"]["yaxis"]["ticktext"]] == [
        "before",
        "predicted",
        "after",
    ]


def test_of_ranks_that_no_prediction_is_of_and_of_runs_without_a_plan_nothing_is_predicted():
    planned, plain = page_of(PLAIN, PLANNED), page_of(PLAIN, PLAIN)

    assert len(planned.figures["both-peaks-rank1"]["layout"]["yaxis"]["ticktext"]) == 2
    assert len(plain.figures["both-steps-rank0"]["layout"]["yaxis"]["ticktext"]) == 2
    assert "predicted" not in plain.text.partition("How to read this")[0].partition("Summary")[2]


def test_the_title_and_the_tables_say_what_the_differences_say():
    found = compared(PLAIN, PLANNED)
    rank = found.ranks[0]
    page = page_of(PLAIN, PLANNED)

    before, after = (
        format_bytes(size) for size in (rank.known_peak_bytes.before, rank.known_peak_bytes.after)
    )
    assert f"Peak {before} → {after}" in page.text
    gone = -sum(row.saved_bytes.difference for row in rank.saved_tensors if row.saved_bytes.difference < 0)
    assert f"{format_bytes(gone)} are no longer kept" in page.text
    assert "The budget of 5.25 MiB" in page.text
    assert "within the steps' own noise" in page.text or "than the steps' own noise" in page.text


def test_every_figure_says_where_its_numbers_come_from():
    html = render_difference(compared(PLAIN, PLANNED))

    captions = re.findall(r"<figure[ >].*?</figcaption>", html.split('id="figures"')[0], re.DOTALL)
    without_numbers = ("What differs between", "The plan, unit by unit", "data-missing")
    figures = [text for text in captions if not any(words in text for words in without_numbers)]
    assert len(figures) > 20
    assert all("kind-measured" in caption for caption in figures)


def test_other_work_damaged_runs_and_lone_ranks_stand_at_the_top():
    lone = make_run(num_ranks=4, missing_ranks=(2,), exit_code=3, exception="ValueError")

    text = page_of(make_run(num_ranks=2), lone).text

    assert "The runs differ in world size, so that what follows compares different work." in text
    assert "Only after: rank 3, not recorded in" in text
    assert "The run after is not whole." in text
    assert "exit code 3 (ValueError)" in text


def test_runs_without_a_common_rank_or_a_traced_step_say_so():
    first, second = (make_run(num_ranks=2, missing_ranks=(rank,)) for rank in (0, 1))
    assert "No rank is recorded in both runs." in page_of(first, second).text

    untraced = make_run(num_ranks=1, num_steps=2, traced_step=None)
    page = page_of(untraced, make_run(num_ranks=1))
    assert "The run before: No step was traced: this rank finished 2 steps." in page.text
    missing = {attributes["data-missing"] for _, attributes in page.tags if "data-missing" in attributes}
    assert {"both-memory", "both-peaks", "both-units", "both-kept"} <= missing
    assert not page_of(make_run(num_ranks=1, num_steps=0), make_run(num_ranks=1)).figures.keys() & {
        "both-steps-rank0"
    }


def test_a_run_compared_with_itself_differs_in_nothing():
    page = page_of(PLAIN, PLAIN)

    assert "The runs do not differ in any of it." in page.text
    assert "Both runs keep the same tensors." in page.text
    assert "Every unit holds as much as before." in page.text


def test_names_from_the_user_stay_text_and_nothing_is_loaded():
    hostile = hostile_run()
    page = page_of(make_run(num_blocks=2), dataclasses.replace(hostile, plan=PLAN))

    assert [tag for tag, _ in page.tags].count("script") == 3
    assert not [tag for tag, _ in page.tags if tag in ("img", "u", "link", "iframe")]
    assert "</script><script>document.title='broken'</script>" in page.text
    for _, attributes in page.tags:
        assert not {"src", "onload", "onerror", "onclick"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")


def test_of_many_ranks_and_units_the_page_stays_small():
    runs = [
        make_run(num_ranks=12, num_blocks=40, num_steps=5, recompute=names) for names in ((), ("blocks.1",))
    ]
    html = render_difference(compared(*runs))

    assert len(html) < 8e6
    assert "rank (8 of 12)" in Page(html).text


def test_the_file_is_its_owners_alone_and_an_impossible_place_is_a_users_error(tmp_path):
    found = compared(make_run(num_blocks=1), make_run(num_blocks=2))
    write_difference(found, tmp_path / "diff.html")

    assert stat.S_IMODE((tmp_path / "diff.html").stat().st_mode) == 0o600
    assert (tmp_path / "diff.html").read_text().endswith("</html>\n")
    with pytest.raises(UsageError, match="cannot be written"):
        write_difference(found, tmp_path / "absent" / "diff.html")
