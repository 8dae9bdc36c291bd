"""The page as a file: complete, offline, escaped, small enough, and true to the analyzers."""

import base64
import dataclasses
import gzip
import hashlib
import json
import re
import stat
from html.parser import HTMLParser

import numpy as np
import plotly.graph_objects as go
import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware
from memadvisor.report.page import render, write_report
from tests.make_run import make_run
from tests.play_training import Settings
from tests.report.hostile import PLAN, hostile_run

FIGURES = {
    "memory",
    "peak-modules",
    "activations",
    "waterfall",
    "units",
    "steps",
    "counters",
    "roofline",
    "lanes",
    "skew",
    "prediction",
}
HARDWARE = Hardware(
    name="card",
    kind="datasheet",
    source="a data sheet",
    memory_bytes=None,
    memory_bandwidth_bytes_per_s=None,
    peak_flops_per_s={"float32": 1e10},
)


class _Page(HTMLParser):
    """Tags with their attributes, texts without those of scripts and styles, and the scripts."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.scripts = [], "", []
        self._inside = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data.replace("\u00a0", " ")  # which keeps a figure with its unit

    @property
    def figures(self):
        return json.loads(self.scripts[0])


def _page(run, hardware=None):
    return _Page(render(analyze(run, hardware)))


def _unpacked(series, factor=1.0):
    return np.frombuffer(base64.b64decode(series["bdata"]), "<f8") * factor


def _names(page):
    return {name.split("-rank")[0] for name in page.figures}


def test_a_run_with_a_plan_and_two_ranks_has_every_figure():
    page = _page(make_run(plan=PLAN))

    assert _names(page) == FIGURES
    assert {name for name in page.figures if name.endswith("-rank1")} == {
        f"{name}-rank1" for name in FIGURES - {"skew", "prediction"}
    }


@pytest.mark.parametrize("changes", [{}, {"plan": PLAN, "recompute": ("blocks.1",)}, {"rank_delay_s": 0.01}])
def test_plotly_accepts_every_figure(changes):
    """graph_objects knows every property of every trace, and raises for any that it does not."""
    for name, figure in _page(make_run(**changes)).figures.items():
        text = re.sub(r'"var\(--[a-z-]+\)"', '"#123456"', json.dumps(figure))
        assert go.Figure(data=json.loads(text)["traces"], layout=json.loads(text)["layout"]).data, name


def test_the_largest_moment_drawn_is_the_peak_to_the_byte():
    run = make_run(num_ranks=1, num_blocks=12, num_micro_batches=6)
    peak = analyze(run).ranks[0].peak

    traces = _page(run).figures["memory-rank0"]["traces"]

    together = next(trace for trace in traces if trace.get("name") == "together")
    assert _unpacked(together["y"], 2**20).max() == peak.allocated_bytes
    areas = [_unpacked(trace["y"], 2**20) for trace in traces if trace.get("stackgroup")]
    assert np.array_equal(np.sum(areas, axis=0), _unpacked(together["y"], 2**20))


def test_tiles_of_the_peak_sum_to_the_peak_and_each_to_its_parts():
    run = make_run(num_ranks=1, num_blocks=40)

    tree = _page(run).figures["peak-modules-rank0"]["traces"][0]

    sizes = dict(zip(tree["ids"], tree["values"], strict=True))
    inside = {}
    for identity, parent in zip(tree["ids"], tree["parents"], strict=True):
        inside[parent] = inside.get(parent, 0) + sizes[identity]
    assert sizes["root"] == analyze(run).ranks[0].peak.allocated_bytes
    assert all(inside[parent] == sizes[parent] for parent in inside if parent)


def test_a_units_bars_are_as_thick_together_as_what_it_keeps_of_one_micro_batch():
    """Micro-batches that follow each other share rows, so the figure is as high as one of them."""
    run = make_run(num_ranks=1, num_micro_batches=3)
    kept = analyze(run).ranks[0].activations

    figure = _page(run).figures["activations-rank0"]

    bars = figure["traces"][-1]
    assert bars["name"] == "kept for the backward"
    assert len(bars["x"]) == len(kept.lifetimes)
    top = [y - width / 2 for y, width in zip(bars["y"], bars["width"], strict=True)]
    bottom = [y + width / 2 for y, width in zip(bars["y"], bars["width"], strict=True)]
    assert min(top) == pytest.approx(0)
    assert max(bottom) == pytest.approx(figure["layout"]["yaxis"]["range"][0])
    assert max(bottom) * 2**20 == pytest.approx(kept.saved_bytes)


def test_phases_of_the_waterfall_add_up_to_the_median_step():
    run = make_run(num_ranks=1)

    bars = _page(run).figures["waterfall-rank0"]["traces"][0]

    assert sum(bars["x"][:-1]) == pytest.approx(bars["x"][-1])
    assert bars["x"][-1] == pytest.approx(100.0)  # ms


def test_figures_of_the_waterfall_stand_beside_its_names_and_leave_no_page_however_narrow():
    figure = _page(make_run(num_ranks=1, plan=PLAN)).figures["waterfall-rank0"]

    assert not any(trace.get("text") for trace in figure["traces"])
    *phases, measured, predicted = (label.split("<br>") for label in figure["layout"]["yaxis"]["ticktext"])
    assert (measured[0], predicted[0]) == ("step, measured", "step, predicted")
    shares = [float(figures.partition("·")[2].removesuffix(" %")) for _, figures in phases]
    assert sum(shares) == pytest.approx(100.0, abs=0.1 * len(shares))


def test_every_figure_says_where_its_numbers_come_from():
    html = render(analyze(make_run(plan=PLAN), HARDWARE))

    captions = re.findall(r"<figure[ >].*?</figcaption>", html.split('id="figures"')[0], re.DOTALL)
    without_numbers = ("What was noted", "The plan, unit by unit", "data-missing")
    figures = [text for text in captions if not any(words in text for words in without_numbers)]
    assert len(figures) > 15
    for caption in figures:
        assert re.search(r"kind-(measured|predicted|theory)", caption), caption
    assert "kind-datasheet" in html


def test_nothing_is_loaded_and_the_policy_forbids_it():
    page = _page(hostile_run())

    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "data", "action", "onload", "onerror", "onclick"} & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "http" not in policy and "unsafe-eval" not in policy
    _, packed, own = page.scripts
    for script in (gzip.decompress(base64.b64decode(packed)).decode(), own):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_plotly_stands_in_the_page_compressed():
    """Every profiled run had 5 MB of it."""
    assert len(render(analyze(make_run(num_ranks=1)))) < 2.5e6


def test_a_kept_word_is_said_at_the_top_and_so_is_a_broken_one():
    run = make_run(num_ranks=1, plan=PLAN)
    peak_bytes = analyze(run).ranks[0].peak.allocated_bytes
    error = 100 * (PLAN.prediction.peak_bytes - peak_bytes) / peak_bytes

    assert f"peak {error:+.1f} %, step " in _page(run).text  # as large as the peak's own
    assert "The budget of 5.25 MiB held" in _page(run).text
    assert "memadvisor advise" not in _page(run).text  # that is for runs without a plan
    by_hand = dataclasses.replace(PLAN, units=(), activation_bits=4)
    assert "activations in 4 bits" in _page(make_run(num_ranks=1, plan=by_hand)).text
    alone = dataclasses.replace(PLAN, num_ranks=1)
    headings = [_page(make_run(num_ranks=1, plan=plan)).text.count("ZeRO stage") for plan in (PLAN, alone)]
    assert headings[0] == headings[1] + 1  # one rank has no stage of a unit
    tight = dataclasses.replace(PLAN, budget_bytes=peak_bytes - 1)
    assert "The plan is for micro-batches of 2 samples" in _page(make_run(num_ranks=1, plan=tight)).text
    tight = dataclasses.replace(tight, micro_batch_size=Settings().micro_batch_size)
    assert "advise again on the plain run" in _page(make_run(num_ranks=1, plan=tight)).text


def test_names_from_the_user_stay_text():
    page = _page(hostile_run())

    assert [tag for tag, _ in page.tags].count("script") == 3
    assert len(page.scripts) == 3
    assert not [tag for tag, _ in page.tags if tag in ("img", "u")]
    assert "</script><script>document.title='broken'</script>" in page.text
    assert "\\x1b[31m\\u2028\\u202e\\udcff<!--" in page.text


def test_what_was_not_recorded_says_so_and_why():
    page = _page(make_run(num_ranks=1, num_steps=2, traced_step=None, exit_code=None))

    missing = {attributes["data-missing"] for _, attributes in page.tags if "data-missing" in attributes}
    assert missing == {
        "memory",
        "peak-modules",
        "states",
        "activations",
        "roofline",
        "operators",
        "lanes",
        "skew",
        "prediction",
    }
    assert _names(page) == {"waterfall", "units", "steps", "counters"}
    assert page.text.count("Not recorded.") == 7
    assert "No step was traced: this rank finished 2 steps." in page.text
    assert "no ending: killed, hanging, or still at it" in page.text


def test_one_rank_without_collectives_is_a_finding_not_a_gap():
    page = _page(make_run(num_ranks=1))

    assert "The traced step ran no collective. The run has one rank." in page.text
    assert "Not recorded." not in page.text


def test_a_missing_peak_of_the_hardware_is_named_and_no_mfu_shown():
    assert "No peak FLOP/s of float32 is known" in _page(make_run()).text
    known = _page(make_run(), HARDWARE)
    assert "MFU" in known.text and "No peak FLOP/s" not in known.text


def test_unexplained_bytes_are_shown_even_when_there_are_none():
    page = _page(make_run(num_ranks=1, unexplained_bytes=0))

    assert "unexplained 0 B" in page.text


def test_storages_above_the_allocators_peak_are_drawn_and_said():
    """A negative rest cannot be a tile; the page says it instead."""
    run = make_run(num_ranks=1, unexplained_bytes=-2048)
    assert analyze(run).ranks[0].peak.unexplained_bytes == -2048

    page = _page(run)

    assert "The storages sum to 2.00 KiB more than the allocator's peak." in page.text
    assert min(page.figures["peak-modules-rank0"]["traces"][0]["values"]) > 0


def test_failed_and_missing_ranks_stand_at_the_top():
    page = _page(make_run(num_ranks=4, missing_ranks=(2,), exit_code=3, exception="ValueError"))

    assert "1 of 4 ranks left no readable record" in page.text
    assert "exit code 3 (ValueError)" in page.text


@pytest.mark.parametrize("num_ranks", [1, 20])
def test_a_long_deep_run_stays_under_8_mb(num_ranks):
    run = make_run(num_ranks=num_ranks, num_blocks=48, num_micro_batches=8, num_steps=5)

    assert len(render(analyze(run))) < 8e6


def test_of_many_ranks_the_fullest_is_shown_first_and_all_are_compared():
    page = _page(make_run(num_ranks=20, num_blocks=1, num_steps=5))

    options = [attributes for tag, attributes in page.tags if tag == "option"]
    assert len(options) == 16
    assert "rank (16 of 20)" in page.text
    assert page.figures["skew"]["traces"][0]["x"] == list(range(20))


def test_the_file_is_its_owners_alone_and_whole(tmp_path):
    path = tmp_path / "report.html"

    write_report(analyze(make_run(num_blocks=1)), path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().endswith("</html>\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written_is_a_users_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(analyze(make_run(num_blocks=1)), tmp_path / "absent" / "report.html")
