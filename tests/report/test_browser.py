"""The page in a real browser: every figure drawn, no error in the console, names still text."""

import os
import re
import shutil
import subprocess

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.run_difference import run_difference
from memadvisor.report.difference_page import render_difference
from memadvisor.report.page import render
from tests.make_run import make_run
from tests.report.hostile import PLAN, hostile_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def browse(tmp_path):
    """Opens a page and returns what the DOM has become, and what the console said."""
    if BROWSER is None:
        is_expected = "CI" in os.environ and "MEMADVISOR_EXPECT_BROWSER" in os.environ
        assert not is_expected, "this machine was to have chromium, and none is found"
        pytest.skip("no Chromium is installed")

    def _browse(html, *options):
        page = tmp_path / "page.html"
        page.write_text(html)
        command = [
            BROWSER,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,900"),
            *("--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom", *options),
            page.as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, console

    return _browse


def _drawn(dom):
    """Names of the figures that hold a picture, and of those that do not."""
    parts = re.split(r'<div class="plot[^"]*" id="figure-', dom)[1:]
    names = {part.split('"', 1)[0]: 'class="main-svg"' in part for part in parts}
    return {name for name in names if names[name]}, {name for name in names if not names[name]}


def test_every_figure_of_the_chosen_rank_is_drawn_without_a_word_in_the_console(browse):
    dom, console = browse(render(analyze(make_run(plan=PLAN, rank_delay_s=0.002))))

    drawn, undrawn = _drawn(dom)
    per_rank = (
        "memory",
        "peak-modules",
        "activations",
        "waterfall",
        "units",
        "steps",
        "counters",
        "roofline",
        "lanes",
    )
    assert console == []
    assert drawn == {"skew", "prediction", *(f"{name}-rank0" for name in per_rank)}
    assert undrawn == {f"{name}-rank1" for name in per_rank}


@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_hostile_names_are_drawn_as_text(browse, scheme):
    dom, console = browse(render(analyze(hostile_run())), f"--blink-settings=preferredColorScheme={scheme}")

    assert console == []
    assert "<title>memadvisor" in dom
    assert "memory-rank0" in _drawn(dom)[0]
    assert "<img" not in dom.replace("<!--", "")
    background = re.search(r'class="xtick".*?fill: (rgb\([^)]*\))', dom, re.DOTALL).group(1)
    assert background == ("rgb(230, 233, 239)" if scheme == 0 else "rgb(26, 30, 38)")


def test_choosing_another_rank_draws_its_figures(browse):
    choice = """<script>
      const rank = document.getElementById("rank");
      rank.value = "1";
      rank.dispatchEvent(new Event("change"));
    </script></body>"""
    html = render(analyze(make_run()))
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)  # lets the test click

    dom, console = browse(html.replace("</body>", choice))

    assert console == []
    assert "memory-rank1" in _drawn(dom)[0]


def test_parts_of_a_row_stand_on_one_line_on_a_narrow_page(browse):
    """Indented by a space, a long name broke after it and stood beneath its own figures."""
    measure = """<script>
      document.body.style.width = "400px";
      document.querySelectorAll("[hidden]").forEach(part => part.hidden = false);
      const lines = cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return new Set([...range.getClientRects()].map(rect => Math.round(rect.top))).size;
      };
      const cells = [...document.querySelectorAll("td:first-child")].filter(
        cell => cell.textContent.trim() === "communication");
      document.title = "lines " + cells.map(lines).join();
    </script></body>"""
    html = render(analyze(make_run(plan=PLAN)))
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)

    dom, _ = browse(html.replace("</body>", measure))

    assert "<title>lines 1<" in dom


@pytest.mark.parametrize("is_old", [True, False])
def test_a_browser_that_cannot_unpack_the_figures_says_so(browse, is_old):
    html = render(analyze(make_run(num_ranks=1)))
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    old = "<script>delete window.DecompressionStream</script>" if is_old else ""

    dom, _ = browse(html.replace("<body>", f"<body>{old}"))

    assert bool(_drawn(dom)[0]) is not is_old
    assert ('id="undrawn">' in dom) is is_old


def test_the_policy_stops_a_foreign_script(browse):
    html = render(analyze(make_run(num_blocks=1)))
    foreign = "<script>document.title = 'broken'</script></body>"

    dom, console = browse(html.replace("</body>", foreign))

    assert "<title>broken" not in dom
    assert any("Content Security Policy" in line for line in console)


def test_two_runs_side_by_side_are_drawn_without_a_word_in_the_console(browse):
    runs = [
        analyze(make_run(num_steps=8)),
        analyze(make_run(num_steps=8, plan=PLAN, recompute=("blocks.1",))),
    ]

    dom, console = browse(render_difference(run_difference(*runs)))

    drawn, undrawn = _drawn(dom)
    per_rank = {"both-memory", "both-categories", "both-peaks", "both-units", "both-steps", "both-every-step"}
    assert console == []
    assert drawn == {"prediction", *(f"{name}-rank0" for name in per_rank)}
    assert undrawn == {f"{name}-rank1" for name in per_rank}
